"""Checkpoints of a run as Hugging Face folders: one in this process, or each during training."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from engine.checkpoint import find_latest
from engine.checkpoint.format import MARKER, read_controller_state, read_role_states
from engine.checkpoint.store import EXPORTS, CheckpointStore, draft_name
from engine.config import LoRAConfig
from engine.errors import CheckpointError, DamagedCheckpointError
from engine.models import has_adapters, load_policy_model, require_model_folder, save_model
from engine.runtime.policy_runtime import saved_tokenizer
from engine.runtime.train_state import load_weights, weights_fingerprint
from engine.storage.folder import Folder
from engine.storage.s3 import upload

if TYPE_CHECKING:
    from engine.trainers.run_spec import RunSpec


CONFIG = "config.json"  # written last to an object store: a folder with it is complete


def start_model_info(spec: RunSpec) -> dict[str, object]:
    """What a checkpoint records of the start model: path, dtype and adapters."""
    path = spec.model_path
    model = str(Path(path).absolute()) if Path(path).is_dir() else path
    return {"model": model, "dtype": spec.dtype, "lora": spec.lora.model_dump(mode="json")}


def export_policy(
    checkpoint: str | Path, target: str | Path, model: str | Path | None = None
) -> str:
    """Write the policy in an RL checkpoint, and its tokenizer, as the actor itself saves them.

    `checkpoint` is a checkpoint's folder, or a run's (its newest good one is taken); `target` must
    not exist. Both may be local or s3://. `model` is the start model's folder or hub id (default:
    the one that the checkpoint names). Checksums of all files are verified; the folder appears
    complete or, in an object store, with its config.json last. Returns the checkpoint's address.
    Raises CheckpointError, ModelError for a start model that isn't there, and StorageError.
    """
    source, folder = check_export(checkpoint, target), Folder(target)
    policy, path, step = _load_policy(source, model)
    if folder.is_local:
        _write_local(policy, path, folder, step)
    else:
        _upload(policy, path, folder)
    return source


def check_export(
    checkpoint: str | Path, target: str | Path, model: str | Path | None = None
) -> str:
    """Do what `export_policy` does before it loads the policy; return the checkpoint's address."""
    source, folder = resolve_checkpoint(checkpoint), Folder(target)
    if is_exported(folder) or (folder.is_local and (folder.sizes() or folder.folders())):
        raise _target_exists(folder)
    _start_model(source, read_controller_state(source).values.get("policy"), model)
    return source


def write_policy(checkpoint: str | Path, folder: str | Path, model: str | Path) -> None:
    """Write the policy in one checkpoint among the files of a local folder; as `export_policy`."""
    policy, path, _ = _load_policy(str(checkpoint), model)
    save_model(policy, saved_tokenizer(path, policy), Path(folder))


def is_exported(folder: Folder) -> bool:
    return CONFIG in folder.sizes()


def resolve_checkpoint(checkpoint: str | Path) -> str:
    """The address of a checkpoint: the one given, or the newest good one in it."""
    folder = Folder(checkpoint)
    if MARKER in folder.sizes():
        return folder.uri
    newest = find_latest(folder.uri)
    if newest is None:
        raise CheckpointError(
            f"{folder} is no complete checkpoint and holds none; name a folder step_<n> with a "
            f"file {MARKER}, or the folder of a run"
        )
    return newest.folder


def _start_model(source: str, policy: Mapping[str, object] | None, model: str | Path | None) -> str:
    """Return the start model's folder or hub id; raise for a checkpoint or a model without one."""
    if policy is None:
        raise CheckpointError(
            f"{source} has no policy of an RL run; a warm start's model folder is the result of "
            "its stage"
        )
    path = str(model or policy["model"])
    require_model_folder(path, "the start model (--model)")
    return path


def _load_policy(source: str, model: str | Path | None) -> tuple[PreTrainedModel, str, int]:
    values = read_controller_state(source).values
    path = _start_model(source, values.get("policy"), model)
    saved, start = read_role_states(source, "actor"), values["policy"]
    policy = load_policy_model(path, start["dtype"], LoRAConfig.model_validate(start["lora"]))
    other = f"{source} is not of the start model {path}: {{}}; give --model the one it began with"
    first = saved[0].values.get("start")
    if has_adapters(policy) and first is not None and first != weights_fingerprint(policy):
        raise CheckpointError(other.format("its adapters were trained on other weights"))
    try:
        load_weights(policy, saved)
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:
        what = str(error).partition(";")[0].removeprefix("the checkpoint is of another model: ")
        raise error.with_message(other.format(what)) from error
    return policy, path, int(values["step"])


def _write_local(policy: PreTrainedModel, path: str, folder: Folder, step: int) -> None:
    """Write to a disk: a draft, which is fsynced and renamed."""
    parent = Folder(Path(folder.path).parent)
    parent.create()
    draft = parent / draft_name(step)
    try:
        save_model(policy, saved_tokenizer(path, policy), draft.path)
        draft.fsync()
        if not draft.move(folder):
            raise _target_exists(folder)
    finally:
        draft.remove()


def _upload(policy: PreTrainedModel, path: str, folder: Folder) -> None:
    """Write to an object store, which can't rename: config.json comes last, and marks the end."""
    with tempfile.TemporaryDirectory(prefix="export-") as near:
        save_model(policy, saved_tokenizer(path, policy), near)
        names = [str(file.relative_to(near)) for file in Path(near).rglob("*") if file.is_file()]
        files = {name: Folder(near).digest(name) for name in names if name != CONFIG}
        upload(Path(near), folder.uri, files, f"upload {Path(folder.path).name}")
        folder.write(CONFIG, [(Path(near) / CONFIG).read_bytes()])


def _target_exists(folder: Folder) -> CheckpointError:
    return CheckpointError(f"{folder} is there already; delete it, or name another folder")


log = logging.getLogger(__name__)

_NICENESS = 10  # training comes first
_SOURCES = str(Path(__file__).parents[2])


class BackgroundExporter:
    """Exports each checkpoint of a run in training to `<run>/huggingface/step_500`, one at a time.

    A process of its own (`python -m engine.export`) does it: loading a model changes global random
    generators and defaults, which training relies on. A failed export is logged and skipped;
    pending ones are found by listing the folders, so that a resumed run exports what the run before
    it left.
    """

    def __init__(self, store: CheckpointStore, model: str, timeout_s: float) -> None:
        """`model` is the start model's path; each export has `timeout_s` seconds."""
        self._store, self._model, self._timeout_s = store, model, timeout_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._requested = False
        self._given_up: set[str] = set()  # names of checkpoints

    def wake(self) -> None:
        """Export all checkpoints that have no model folder yet; return at once."""
        with self._lock:
            self._requested = True
            if self._thread is None:
                # A daemon: a terminated run doesn't wait, and its child process ends with it.
                self._thread = threading.Thread(target=self._work, name="exports", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Return when every checkpoint is exported, or its export has failed."""
        self.wake()
        if (thread := self._thread) is not None:
            thread.join()  # each export has a deadline

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._requested:
                    self._thread = None
                    return
                self._requested = False
            try:
                while (name := self._next_unexported()) is not None:
                    self._export_checkpoint(name)
            except (CheckpointError, OSError) as error:
                log.warning("no model folders of checkpoints: %s; training continues", error)

    def _next_unexported(self) -> str | None:
        pending = (name for name in self._store.complete() if name not in self._given_up)
        return next((name for name in pending if not is_exported(self._target(name))), None)

    def _export_checkpoint(self, name: str) -> None:
        source, folder = self._store.root / name, self._target(name)
        fault = self._run_export(source, folder)
        if MARKER not in source.sizes():  # deleted by retention
            folder.remove()
        elif fault and not is_exported(folder):  # an earlier attempt's process may still export it
            self._given_up.add(name)
            log.warning("no model folder of checkpoint %s: %s; training continues", source, fault)

    def _target(self, name: str) -> Folder:
        return self._store.root / EXPORTS / name

    def _run_export(self, source: Folder, folder: Folder) -> str:
        """Run the command; return why it failed, or nothing."""
        command = [sys.executable, "-m", "engine.export", source.uri, "--out", folder.uri]
        paths = filter(None, [_SOURCES, os.environ.get("PYTHONPATH")])
        # Training uses the devices and cores.
        hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile("w+") as stderr:
            process = subprocess.Popen(
                [*command, "--model", self._model, "--beside"],
                env=os.environ | hidden | {"PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.PIPE,  # closed when this process ends, however it does
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
            assert process.stdin is not None
            with process.stdin:
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
                try:
                    status = process.wait(self._timeout_s)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    return f"it was not made in {self._timeout_s:g} s"
            stderr.seek(0)
            lines = stderr.read().strip().splitlines() or [f"exit status {status}"]
        return lines[-1].removeprefix("error: ") if status else ""
