"""What an RL run resumes from: its checkpoints, and the settings that are recorded with them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from engine.checkpoint import CheckpointStore, Saver
from engine.config import RLConfig
from engine.controller.roles import Roles
from engine.trainers.background_export import BackgroundExporter
from engine.trainers.rl_setup import RunSpec
from engine.trainers.run_settings import flat
from engine.workers.stateful import StatefulWorker

SCORE = "validation/reward"  # by which the best checkpoint is kept

_LOAD_ORDER = ("actor", "rollout", "critic", "sampler")  # actor first: others serve its weights
_MAY_DIFFER: dict[str, bool | set[str]] = {
    "trainer": True,
    "actor": {"parallel", "max_tokens_per_micro_batch"},
    "critic": {"parallel", "max_tokens_per_micro_batch"},
    "reference": True,
    "debug": True,
    "rollout": {"tensor_parallel_size", "val_kwargs"},
}
# Read again at every step and part of no saved state, so that a resumed run may have others.
MAY_CHANGE = (
    "rl.actor.optim",
    "rl.actor.clip_ratio",
    "rl.actor.clip_ratio_low",
    "rl.actor.clip_ratio_high",
    "rl.actor.clip_ratio_c",
    "rl.actor.entropy_coeff",
    "rl.actor.kl_loss_coef",
    "rl.rollout.agent.save_freq_s",
    "rl.rollout.agent.num_workers",
    "rl.rollout.agent.concurrency",
    "rl.critic.optim",
    "rl.critic.cliprange_value",
    "rl.reward.timeout_s",
    "rl.reward.on_error",
)


def make_saver(folder: str | Path, roles: Roles, spec: RunSpec) -> Saver:
    """The saver of a run's roles under `folder` (local or s3://)."""
    settings = spec.config.trainer
    store = CheckpointStore(
        folder,
        keep_last=settings.max_checkpoints_to_keep,
        metric=SCORE,
        restart=settings.on_damaged_checkpoints == "restart",
    )
    stateful = sorted(r for r in roles if issubclass(roles[r].worker_class, StatefulWorker))
    groups = {
        role: roles[role] for role in dict.fromkeys((*_LOAD_ORDER, *stateful)) if role in roles
    }
    exporter = None
    if settings.save_huggingface:
        exporter = BackgroundExporter(store, spec.model_path, settings.step_timeout_s)
    return Saver(store, groups, settings.step_timeout_s, exporter)


def save_episodes(
    folder: str | Path, before: str | Path | None, roles: Roles, spec: RunSpec
) -> None:
    """Have a step's episodes saved beside its checkpoints while they are rolled out, in mode sync,
    and go on from there or from `before`, the folder that the run resumes from.

    Other modes have what they roll out ahead in checkpoints.
    """
    if not spec.config.rollout.multi_turn.enable or spec.config.trainer.mode != "sync":
        return
    settings = run_settings(spec.config, spec.max_response_length, spec.seed)
    known = {name: value for name, value in settings.items() if not name.startswith(MAY_CHANGE)}
    text = json.dumps([known, spec.model_path, spec.dtype, spec.max_model_len], default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()
    roles["rollout"].save_episodes(str(folder), digest, str(before or "")).result()


def run_settings(config: RLConfig, max_response_length: int, seed: int) -> dict[str, object]:
    """The settings that a checkpoint records, by dotted name: a resumed run must share them.

    Those in `MAY_CHANGE` may have changed. Left out are length, save frequency, placement, layouts
    and deadlines, which may differ. The roles' own states identify model and adapters.
    """
    trainer = config.trainer
    rl = config.model_dump(mode="json", exclude=_MAY_DIFFER)
    kept = {"mode": trainer.mode, "train_batch_size": trainer.train_batch_size}
    data = {"max_response_length": max_response_length}
    return flat({"rl": rl | {"trainer": kept}, "data": data, "seed": seed})
