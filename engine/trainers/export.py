"""A checkpoint's policy as a Hugging Face folder, assembled in one process.

Exporting during a run is in `background_export`, the command in `engine.export`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from engine.checkpoint import find_latest
from engine.checkpoint.format import MARKER
from engine.checkpoint.rank_state import RankState, read_role_states, read_values
from engine.checkpoint.retention import draft_name
from engine.config import LoRAConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import CheckpointError, DamagedCheckpointError
from engine.models import has_adapters, load_policy_model, require_model_folder, save_model
from engine.runtime.sharded_train_state import load_weights, weights_fingerprint
from engine.storage.folder import Folder
from engine.storage.transfer import upload

if TYPE_CHECKING:
    from engine.trainers.rl_setup import RunSpec

CONFIG = "config.json"  # written last to an object store: a folder with it is complete


def start_model_info(spec: RunSpec) -> dict[str, object]:
    """What a checkpoint records of the start model: path, dtype and adapters."""
    path = Path(spec.model_path)
    return {
        "model": str(path.absolute()) if path.is_dir() else spec.model_path,
        "dtype": spec.dtype,
        "lora": spec.lora.model_dump(mode="json"),
    }


def export_policy(
    checkpoint: str | Path, target: str | Path, model: str | Path | None = None
) -> str:
    """Write the policy in an RL checkpoint, and its tokenizer, as the actor itself saves them.

    `checkpoint` is a checkpoint's folder, or a run's (its newest good one is taken); `target` must
    not exist. Both may be local or s3://. `model` is the folder or hub id that training started
    from (default: the one that the checkpoint names). Checksums of all files are verified; the
    folder appears complete or, in an object store, with its config.json last. Returns the
    checkpoint's address. Raises CheckpointError, ModelError for a start model that isn't there,
    and StorageError.
    """
    source, place = resolve_checkpoint(checkpoint), Folder(target)
    if is_exported(place) or (place.is_local and (place.sizes() or place.folders())):
        raise _target_exists(place)
    policy, path, step = _load_policy(source, model)
    if place.is_local:
        _write_local(policy, path, place, step)
    else:
        _upload(policy, path, place)
    return source


def write_policy(checkpoint: str | Path, folder: str | Path, model: str | Path) -> None:
    """Write the policy in one checkpoint among the files of a local folder, file by file.

    `model` is the start model. Raises as `export_policy` does.
    """
    policy, path, _ = _load_policy(str(checkpoint), model)
    save_model(policy, load_tokenizer(path), Path(folder))


def is_exported(place: Folder) -> bool:
    """Whether a complete model folder is there."""
    return CONFIG in place.sizes()


def resolve_checkpoint(checkpoint: str | Path) -> str:
    """The address of a checkpoint: the one given, or the newest good one in it."""
    folder = Folder(checkpoint)
    if MARKER in folder.sizes():
        return folder.uri
    found = find_latest(folder.uri)
    if found is None:
        raise CheckpointError(
            f"{folder} is no complete checkpoint and holds none; name a folder step_<n> with a "
            f"file {MARKER}, or the folder of a run"
        )
    return found.folder


def _load_policy(source: str, model: str | Path | None) -> tuple[PreTrainedModel, str, int]:
    """The policy in a checkpoint, the start model that it was loaded into, and its step."""
    values = read_values(source)
    start = values.get("policy")
    if start is None:
        raise CheckpointError(
            f"{source} has no policy of an RL run; a warm start's model folder is the result of "
            "its stage"
        )
    saved = read_role_states(source, "actor")
    path = str(model or start["model"])
    require_model_folder(path, "the start model (--model)")
    policy = load_policy_model(path, start["dtype"], LoRAConfig.model_validate(start["lora"]))
    _load_saved_weights(policy, saved, source, path)
    return policy, path, int(values["step"])


def _load_saved_weights(
    policy: PreTrainedModel, saved: list[RankState], source: str, path: str
) -> None:
    """Load the saved weights into the start model; raise CheckpointError for another model."""
    other = f"{source} is not of the start model {path}: {{}}; give --model the one it began with"
    start = saved[0].values.get("start")
    if has_adapters(policy) and start is not None and start != weights_fingerprint(policy):
        raise CheckpointError(other.format("its adapters were trained on other weights"))
    try:
        load_weights(policy, saved)
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:
        what = str(error).partition(";")[0].removeprefix("the checkpoint is of another model: ")
        raise CheckpointError(other.format(what)) from error


def _write_local(policy: PreTrainedModel, path: str, place: Folder, step: int) -> None:
    """To a disk: write a draft, fsync it, rename it."""
    parent = Folder(Path(place.path).parent)
    parent.create()
    draft = parent / draft_name(step)
    try:
        save_model(policy, load_tokenizer(path), draft.path)
        draft.fsync()
        if not draft.move(place):
            raise _target_exists(place)
    finally:
        draft.remove()


def _upload(policy: PreTrainedModel, path: str, place: Folder) -> None:
    """To an object store, which can't rename: config.json, which marks it complete, is last."""
    with tempfile.TemporaryDirectory(prefix="export-") as near:
        save_model(policy, load_tokenizer(path), near)
        names = [str(file.relative_to(near)) for file in Path(near).rglob("*") if file.is_file()]
        files = {name: Folder(near).digest(name) for name in names if name != CONFIG}
        upload(Path(near), place.uri, files, f"upload {Path(place.path).name}")
        place.write(CONFIG, [(Path(near) / CONFIG).read_bytes()])


def _target_exists(place: Folder) -> CheckpointError:
    return CheckpointError(f"{place} is there already; delete it, or name another folder")
