"""What an RL run resumes from: its checkpoints, and the settings that must be the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.checkpoint import Checkpoint, CheckpointStore, Saver
from engine.config import RLConfig
from engine.controller.roles import Roles
from engine.errors import CheckpointError
from engine.trainers.background_export import BackgroundExporter
from engine.trainers.rl_setup import RunSpec
from engine.workers.stateful import StatefulWorker

SCORE = "validation/reward"  # by which the best checkpoint is kept

_LOAD_ORDER = ("actor", "rollout", "critic", "sampler")  # actor first: others serve its weights
_MAX_LISTED = 3  # changed settings in an error message
_MAY_DIFFER: dict[str, bool | set[str]] = {
    "trainer": True,
    "actor": {"parallel", "max_tokens_per_micro_batch"},
    "critic": {"parallel", "max_tokens_per_micro_batch"},
    "rollout": {"tensor_parallel_size"},
}


def make_saver(folder: str | Path, roles: Roles, spec: RunSpec) -> Saver:
    """The saver of a run's roles under `folder` (local or s3://)."""
    settings = spec.config.trainer
    store = CheckpointStore(
        folder,
        keep_last=settings.max_checkpoints_to_keep,
        metric=SCORE,
        begin_anew=settings.on_damaged_checkpoints == "begin_anew",
    )
    stateful = sorted(r for r in roles if issubclass(roles[r].worker_class, StatefulWorker))
    groups = {
        role: roles[role] for role in dict.fromkeys((*_LOAD_ORDER, *stateful)) if role in roles
    }
    exporter = None
    if settings.save_huggingface:
        exporter = BackgroundExporter(store, spec.model_path, settings.step_timeout_s)
    return Saver(store, groups, settings.step_timeout_s, exporter)


def run_settings(config: RLConfig, max_response_length: int, seed: int) -> dict[str, object]:
    """The settings that a resumed run must share with the one before it, by dotted name.

    Length, save frequency, placement, layouts and deadlines may differ. The roles' own states
    identify model and adapters.
    """
    trainer = config.trainer
    rl = config.model_dump(mode="json", exclude=_MAY_DIFFER)
    kept = {"mode": trainer.mode, "train_batch_size": trainer.train_batch_size}
    data = {"max_response_length": max_response_length}
    return _flat({"rl": rl | {"trainer": kept}, "data": data, "seed": seed})


def check_settings(checkpoint: Checkpoint, settings: Mapping[str, object]) -> None:
    """Raise CheckpointError if the checkpoint is of a run with other `settings`."""
    changes = _changes(checkpoint.state.get("settings"), settings)
    if changes:
        raise CheckpointError(
            f"{checkpoint.folder} was written under other settings: {changes}; resume with its "
            "settings, or give another checkpoint folder"
        )


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Leaves by dotted name, e.g. "rl.rollout.n": 8."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= _flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _changes(there: object, here: Mapping[str, object]) -> str:
    """What differs between a checkpoint's settings and this run's, in words; empty for nothing."""
    if not isinstance(there, dict):
        return "another version of the engine wrote it"
    names = sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n))
    shown = [f"{n} is {there.get(n)!r} there and {here.get(n)!r} here" for n in names[:_MAX_LISTED]]
    more = [f"{len(names) - _MAX_LISTED} more"] if len(names) > _MAX_LISTED else []
    return ", ".join(shown + more)
