"""Saving and resuming an RL run: what its checkpoint holds besides the roles' own states."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoint import Checkpoint, CheckpointStore, Saver
from engine.checkpoint.rng import process_rng, set_process_rng
from engine.config import RLConfig
from engine.errors import CheckpointError
from engine.trainers.background_export import BackgroundExporter
from engine.trainers.export import start_model_info
from engine.trainers.queue_state import Queued

if TYPE_CHECKING:
    from engine.trainers.rl import RLTrainer

log = logging.getLogger(__name__)

_WITH_STATE = ("actor", "rollout", "critic", "sampler")  # actor first: others serve its weights
_SCORE = "validation/reward"
_SHOWN = 3  # settings that a refusal names
_MAY_DIFFER: Any = {
    "trainer": True,
    "actor": {"parallel", "max_tokens_per_micro_batch"},
    "critic": {"parallel", "max_tokens_per_micro_batch"},
    "rollout": {"tensor_parallel_size"},
}


def make_saver(trainer: RLTrainer, folder: str | Path) -> Saver:
    """Checkpoints of a trainer's roles under `folder` (local or s3://)."""
    settings = trainer.config.trainer
    store = CheckpointStore(folder, keep_last=settings.max_checkpoints_to_keep, metric=_SCORE)
    groups = {role: trainer.roles[role] for role in _WITH_STATE if role in trainer.roles}
    exports = None
    if settings.save_huggingface:
        exports = BackgroundExporter(store, trainer.spec.model_path, settings.step_timeout_s)
    return Saver(store, groups, settings.step_timeout_s, exports)


def save(trainer: RLTrainer, saver: Saver, metrics: dict[str, float]) -> None:
    """Begin to write a checkpoint; a failed one costs no training, and is said aloud."""
    score = {_SCORE: metrics[_SCORE]} if _SCORE in metrics else {}
    try:
        saver.save(trainer.step, _state(trainer), score)
    except CheckpointError as error:
        log.warning("no checkpoint at step %d: %s; training goes on", trainer.step, error)


def restore(trainer: RLTrainer, saver: Saver, checkpoint: Checkpoint) -> None:
    """Put trainer and roles where a checkpoint was taken.

    Raises CheckpointError when it is one of other settings.
    """
    changes = _changes(checkpoint.state.get("settings"), _settings(trainer))
    if changes:
        raise CheckpointError(
            f"{checkpoint.folder} was written under other settings: {changes}; resume with its "
            "settings, or give another checkpoint folder"
        )
    state = saver.restore(checkpoint)
    if "sampler" in trainer.roles:
        trainer.roles.sampler.load_weights(trainer.roles.actor.weights()).result()
    trainer.step = int(state["step"])
    trainer.prompts.load_state_dict(state["prompts"])
    trainer.restored = [Queued.of(tree) for tree in state["queue"]]
    trainer.algo.load_state_dict(state["algo"])
    trainer.history = [dict(row) for row in state["history"]]
    set_process_rng(state["rng"])


def run_settings(config: RLConfig, max_response_length: int, seed: int) -> dict[str, Any]:
    """The settings that a resumed run must share with the one before it, by dotted name.

    Its length, pace of saving, placement, layouts and deadlines may differ. What the model is, and
    which adapters it has, the roles' own states tell.
    """
    trainer = config.trainer
    rl = config.model_dump(mode="json", exclude=_MAY_DIFFER)
    kept = {"mode": trainer.mode, "train_batch_size": trainer.train_batch_size}
    data = {"max_response_length": max_response_length}
    return _flat({"rl": rl | {"trainer": kept}, "data": data, "seed": seed})


def _settings(trainer: RLTrainer) -> dict[str, Any]:
    spec = trainer.spec
    return run_settings(spec.config, spec.max_response_length, spec.seed)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted name, e.g. "rl.rollout.n": 8."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= _flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _changes(there: Any, here: dict[str, Any]) -> str:
    """What differs between a checkpoint's settings and this run's, in words; empty for nothing."""
    if not isinstance(there, dict):
        return "another version of the engine wrote it"
    names = sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n))
    shown = [f"{n} is {there.get(n)!r} there and {here.get(n)!r} here" for n in names[:_SHOWN]]
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join(shown + more)


def _state(trainer: RLTrainer) -> dict[str, Any]:
    with trainer.pending() as pending:
        # Rollout has not begun yet where something is restored: a run that has just gone on.
        queue = [one.tree() for one in (*trainer.restored, *pending.queued)]
        prompts = trainer.prompts.state_dict(unfinished=pending.begun)
    return {
        "step": trainer.step,
        "settings": _settings(trainer),
        "policy": start_model_info(trainer.spec),
        "queue": queue,
        "prompts": prompts,
        "algo": trainer.algo.state_dict(),
        "history": trainer.history,
        "rng": process_rng(),
    }
