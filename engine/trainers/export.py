"""A checkpoint's policy as a Hugging Face folder, put together without ranks.

What lives here: one folder, from the boxes that ranks saved and the model that training started
from. What does not: making them beside a run (`export_beside`), the command (`engine.export`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from engine.checkpoint import find_latest
from engine.checkpoint.layout import MARKER
from engine.checkpoint.retention import draft_name
from engine.checkpoint.saved_state import SavedRank, read_role, read_values
from engine.config import LoRAConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import CheckpointError, DamagedCheckpointError
from engine.models import has_adapters, policy_model, require_model_folder, save_model
from engine.runtime.sharded_train_state import load_weights, weights_fingerprint
from engine.storage.folder import Folder
from engine.storage.transfer import Item, upload

if TYPE_CHECKING:
    from engine.trainers.rl_setup import Build

CONFIG = "config.json"  # written last to an object store: with it, a folder is whole


def start_of(build: Build) -> dict[str, Any]:
    """What a checkpoint says of the policy beside its weights: from what it was loaded, and how."""
    path = Path(build.model_path)
    return {
        "model": str(path.absolute()) if path.is_dir() else build.model_path,
        "dtype": build.dtype,
        "lora": build.lora.model_dump(mode="json"),
    }


def export_policy(
    checkpoint: str | Path, target: str | Path, model: str | Path | None = None
) -> str:
    """Write the policy in an RL checkpoint, and its tokenizer, as the actor itself saves them.

    `checkpoint` is a checkpoint's folder, or a run's, whose newest good one is meant; `target` must
    not exist. Both may be local or s3://. `model` is the folder or hub id that training started
    from (default: the one that the checkpoint names). Every file that is read is checked; the
    folder appears whole or, in an object store, with its config.json last. Returns the
    checkpoint's address. Raises CheckpointError, ModelError for a start model that isn't there,
    and StorageError.
    """
    source, place = _chosen(checkpoint), Folder(target)
    if is_exported(place) or (place.is_local and (place.sizes() or place.folders())):
        raise _taken(place)
    values = read_values(source)
    start = values.get("policy")
    if start is None:
        raise CheckpointError(
            f"{source} has no policy of an RL run; a warm start's model folder is the result of "
            "its stage"
        )
    saved = read_role(source, "actor")
    path = str(model or start["model"])
    require_model_folder(path, "the start model (--model)")
    policy = policy_model(path, start["dtype"], LoRAConfig.model_validate(start["lora"]))
    _fill(policy, saved, source, path)
    if place.is_local:
        _write_here(policy, path, place, int(values["step"]))
    else:
        _upload(policy, path, place)
    return source


def is_exported(place: Folder) -> bool:
    """Whether a model folder is there, whole."""
    return CONFIG in place.sizes()


def _chosen(checkpoint: str | Path) -> str:
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


def _fill(policy: PreTrainedModel, saved: list[SavedRank], source: str, path: str) -> None:
    """Put what was saved into the start model; refuse another one."""
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


def _write_here(policy: PreTrainedModel, path: str, place: Folder, step: int) -> None:
    """On a disk: under another name, forced to it, then renamed."""
    parent = Folder(Path(place.path).parent)
    parent.create()
    draft = parent / draft_name(step)
    try:
        save_model(policy, load_tokenizer(path), draft.path)
        draft.settle()
        if not draft.move(place):
            raise _taken(place)
    finally:
        draft.remove()


def _upload(policy: PreTrainedModel, path: str, place: Folder) -> None:
    """To an object store, which can't rename: what tells that a folder is whole comes last."""
    with tempfile.TemporaryDirectory(prefix="export-") as near:
        save_model(policy, load_tokenizer(path), near)
        names = [str(file.relative_to(near)) for file in Path(near).rglob("*") if file.is_file()]
        sums = {name: Folder(near).sum(name) for name in names if name != CONFIG}
        items = [Item(name, file.size, file.sha256) for name, file in sums.items()]
        upload(Path(near), place.uri, items, f"upload {Path(place.path).name}")
        place.write(CONFIG, [(Path(near) / CONFIG).read_bytes()])


def _taken(place: Folder) -> CheckpointError:
    return CheckpointError(f"{place} is there already; delete it, or name another folder")
