"""Whether what a run names is there: model, teacher, data files, reward, packages of loggers.

It loads neither torch nor Ray, so that a wrong name is known at once. What is in the files is
checked by `data` and the trainer.
"""

from __future__ import annotations

from engine.cli.settings import RunConfig
from engine.errors import ConfigError, DataError
from engine.plugins import import_plugins
from engine.rewards import require_rewards
from engine.storage.filesystem import as_path, is_remote
from engine.storage.hub import pin_revision, refuse_own_code
from engine.tracking.metric_logs import require_packages


def check_names(config: RunConfig) -> None:
    """Raise an EngineError that names the first setting whose value isn't there."""
    if not config.model.path:
        raise ConfigError(
            "actor_rollout_ref.model.path is missing; give a Hugging Face folder or hub id"
        )
    for file in (*config.data.train_files, *config.data.val_files):
        if not is_remote(file) and not as_path(file).exists():
            raise DataError(f"{file} does not exist; check the path")
    require_packages(config.run.logger, "run.logger")
    import_plugins(config.rl.plugins)
    require_rewards(config.rl.reward)
    for setting, teacher in config.rl.algorithm.teacher_models.items():
        pin_revision(teacher, setting)
    if config.rl.critic.model_path:
        pin_revision(config.rl.critic.model_path, "rl.critic.model_path")
    pin_revision(config.model.path)
    if config.model.trust_remote_code:
        refuse_own_code(config.model.path)
    if config.run.val_only and not config.data.val_files:
        raise ConfigError("run.val_only=true has nothing to validate on; give data.val_files")
    if config.run.resume_mode == "resume_path" and not config.rl.trainer.resume_from:
        raise ConfigError(
            "run.resume_mode=resume_path without trainer.resume_from_path; name the checkpoint"
        )
