"""Saving and resuming an RL run: what its checkpoint holds besides the roles' own states."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoint import Checkpoint, CheckpointStore, Saver
from engine.checkpoint.rng import process_rng, set_process_rng
from engine.config import RLConfig
from engine.errors import CheckpointError
from engine.trainers.export import start_of
from engine.trainers.export_beside import Exports
from engine.trainers.queue_state import Queued

if TYPE_CHECKING:
    from engine.trainers.rl import RLTrainer

log = logging.getLogger(__name__)

_WITH_STATE = ("actor", "rollout", "critic", "sampler")  # actor first: others serve its weights
_SCORE = "validation/reward"
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
    groups = {role: getattr(trainer.roles, role) for role in _WITH_STATE if role in trainer.roles}
    exports = None
    if settings.save_huggingface:
        exports = Exports(store, trainer.build.model_path, settings.step_timeout_s)
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
    written = checkpoint.state.get("settings")
    if written != settings_digest(trainer.config):
        raise CheckpointError(
            f"{checkpoint.folder} was written under other settings; resume with its settings, or "
            "give another checkpoint folder"
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


def settings_digest(config: RLConfig) -> str:
    """Digest of the settings that a resumed run must share with the one before it.

    Its length, pace of saving, placement, layouts and deadlines may differ.
    """
    trainer = config.trainer
    kept = {"mode": trainer.mode, "train_batch_size": trainer.train_batch_size}
    values = config.model_dump_json(exclude=_MAY_DIFFER) + str(sorted(kept.items()))
    return hashlib.sha256(values.encode()).hexdigest()


def _state(trainer: RLTrainer) -> dict[str, Any]:
    with trainer.pending() as pending:
        queue = [one.tree() for one in pending.queued]
        prompts = trainer.prompts.state_dict(again=pending.begun)
    return {
        "step": trainer.step,
        "settings": settings_digest(trainer.config),
        "policy": start_of(trainer.build),
        "queue": queue,
        "prompts": prompts,
        "algo": trainer.algo.state_dict(),
        "history": trainer.history,
        "rng": process_rng(),
    }
