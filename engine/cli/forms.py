"""The arguments of each `python -m engine.main_…`, and the settings that they become."""

import os
from typing import Any

from engine.cli import settings
from engine.cli.resolve import Form, Override, Resolved, require_int
from engine.cli.reward_file import reward_name
from engine.errors import ConfigError, DataError
from engine.registry import import_plugins
from engine.rewards import require_rewards
from engine.storage.filesystem import as_path, is_remote, pin_revision, refuse_own_code
from engine.tracking.metric_logs import require_packages

# Settings that say nothing unless another one turns them on, as in verl itself.
_IDLE = {
    "rl.algorithm.use_kl_in_reward": ("rl.algorithm.kl_ctrl.", "rl.algorithm.kl_penalty"),
    "rl.actor.use_kl_loss": ("rl.actor.kl_loss_coef", "rl.actor.kl_loss_type"),
    "rl.rollout.val_kwargs.do_sample": ("rl.rollout.val_kwargs.",),
}
# verl's sections of rewards, which make `rl.reward` together: a function in a file, or a model.
REWARD_FILES = ("custom_reward_function", "reward.custom_reward_function")
_REWARD_MODELS = ("reward_model", "reward.reward_model")
_REWARD_MODEL_OPTIONS = {
    "model.path": "model",
    "model_path": "model",
    "max_length": "max_length",
    "micro_batch_size_per_gpu": "batch_size",
}


def _finish_ppo(resolved: Resolved[settings.RunConfig]) -> None:
    _name_rewards(resolved)
    resolved.drop_nulls()
    overrides = resolved.overrides
    steps = overrides.get("rl.trainer.total_training_steps")
    if steps and "run.total_epochs" in overrides:  # verl's rule: the number of steps wins
        resolved.no_effect(overrides.pop("run.total_epochs").key, f"{steps.key} is given")
    estimator = "rl.algorithm.adv_estimator"
    if estimator not in overrides and "rl.algorithm.dataflow" not in overrides:
        critic = next((o for p, o in overrides.items() if p.startswith("rl.critic.")), None)
        if critic is not None:
            overrides[estimator] = Override("gae", critic.key)
            notice = f"algorithm.adv_estimator is gae, as in verl: {critic.key} is given"
            resolved.notices.append(notice)
    _drop_idle(resolved)


def _drop_idle(resolved: Resolved[settings.RunConfig]) -> None:
    """Drop keys that have no effect in verl either, or tune an engine that doesn't decode."""
    engine = resolved.value("rl.rollout.engine")
    for path, override in list(resolved.overrides.items()):
        why = ""
        is_verls = override.key.startswith("actor_rollout_ref.")
        if engine != "vllm" and path.startswith("rl.rollout.vllm.") and is_verls:
            why = f"{engine} decodes, not vllm; see actor_rollout_ref.rollout.name"
        for switch, idle in _IDLE.items():
            if path.startswith(idle) and not resolved.value(switch):
                why = f"{switch.removeprefix('rl.')} is false"
        if why and not override.key.startswith("rl."):
            del resolved.overrides[path]
            if override.value != resolved.value(path):
                resolved.no_effect(override.key, why)


def _name_rewards(resolved: Resolved[settings.RunConfig]) -> None:
    """Make `rl.reward` of verl's keys of rewards; a reward that was named after them wins."""
    sections: dict[str, dict[str, Any]] = {}  # values by verl's section, the latest last
    for path, override in list(resolved.overrides.items()):
        if path == "rl.reward.name":
            sections.clear()
        for section in (*REWARD_FILES, *_REWARD_MODELS):
            if path.startswith(f"{section}."):
                values = sections[section] = sections.pop(section, {})
                if override.value is not None:
                    values[path.removeprefix(f"{section}.")] = override.value
                del resolved.overrides[path]
    file_key = ""
    for section, values in sections.items():
        if section in REWARD_FILES and "path" in values:
            file_key, function = f"{section}.path", str(values.get("name") or "compute_score")
            name = reward_name(str(values["path"]), function, _reward_keywords(values))
            resolved.overrides["rl.reward.name"] = Override(name, file_key)
    for section, values in sections.items():
        if section not in _REWARD_MODELS:
            continue
        enabled = values.pop("enable", False)
        if not isinstance(enabled, bool):
            raise ConfigError(f"{section}.enable={enabled!r} must be true or false")
        if not enabled:
            for name in values:
                resolved.no_effect(f"{section}.{name}", "there is no reward model to load")
            continue
        if file_key:
            raise ConfigError(
                f"{section}.enable=true with {file_key}: only one can score; leave one out"
            )
        options = {_REWARD_MODEL_OPTIONS[name]: value for name, value in values.items()}
        if "model" not in options:
            raise ConfigError(f"{section}.enable=true needs {section}.model.path, a classifier")
        resolved.overrides |= {
            "rl.reward.name": Override("reward_model", f"{section}.enable"),
            "rl.reward.options": Override(options, f"{section}.model.path"),
        }


def _reward_keywords(values: dict[str, object]) -> dict[str, object]:
    """Return the arguments of a reward function, which may stand together and one by one."""
    keywords = values.get("reward_kwargs", {})
    if not isinstance(keywords, dict):
        raise ConfigError(f"reward_kwargs={keywords!r} must be names and values")
    start = "reward_kwargs."
    single = {n.removeprefix(start): v for n, v in values.items() if n.startswith(start)}
    return {str(name): value for name, value in (keywords | single).items()}


_RANKS = ("trainer.n_gpus_per_node", "trainer.nnodes")
_SFT_KEYS = (
    *_RANKS,
    *(f"data.{name}_{end}" for name in ("prompt", "response") for end in ("key", "dict_keys")),
)


def _finish_sft(resolved: Resolved[settings.SFTRunConfig]) -> None:
    """Make columns and ranks of verl's keys for them; refuse to be one of torchrun's processes."""
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes of this program, which starts "
            "its ranks itself: run it once, with trainer.n_gpus_per_node"
        )
    resolved.drop_nulls()
    overrides = resolved.overrides
    together = {key: overrides.pop(key) for key in _SFT_KEYS if key in overrides}
    for name in ("prompt", "response"):
        key, fields = (together.get(f"data.{name}_{end}") for end in ("key", "dict_keys"))
        inside = fields.value if fields else []
        inside = inside if isinstance(inside, list) else [inside]
        column = ".".join(map(str, [key.value if key else name, *inside]))  # info.question
        path = f"data.columns.{name}"
        if column != name and path not in overrides:
            overrides[path] = Override(column, f"data.{name}_key")
    ranks = 1
    for name in _RANKS:
        if name in together:
            ranks *= require_int(name, together[name].value, least=1)
    if ranks > 1:
        sequence = resolved.value("sft.parallel.sp")
        shards = ranks // (sequence if isinstance(sequence, int) else 1)
        derived: dict[str, object] = {"sft.parallel.fsdp": shards}
        if any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd"))):
            derived["sft.pools"] = [{"roles": ["sft"], "gpus": 1.0}]
        overrides |= {path: Override(value, path) for path, value in derived.items()}


_REWARD_KEYS = [f"{section}.{name}" for section in REWARD_FILES for name in ("path", "name")]
_REWARD_KEYS += [
    f"{s}.{name}" for s in _REWARD_MODELS for name in ("enable", *_REWARD_MODEL_OPTIONS)
]
_KEYWORDS = {f"{section}.reward_kwargs": dict for section in REWARD_FILES}
# What most people set, in the order of --help.
_COMMON = ("data.train_files", "data.val_files", "model.path", "model.lora.rank")
_COMMON_RUN = ("run.default_local_dir", "run.logger", "seed")
_COMMON_RL = (
    *("data.max_prompt_length", "data.max_response_length", "rl.trainer.train_batch_size"),
    *("rl.rollout.n", "rl.rollout.temperature", "rl.rollout.engine"),
    *("rl.algorithm.adv_estimator", "rl.actor.optim.lr", "rl.actor.ppo_mini_batch_size"),
    *("rl.actor.use_kl_loss", "rl.reward.name", "custom_reward_function", "run.total_epochs"),
    *("rl.trainer.total_training_steps", "run.n_gpus_per_node", "run.save_freq"),
    "rl.trainer.test_freq",
)
_COMMON_OFFLINE = (
    *("optim.lr", "train_batch_size", "epochs", "max_steps", "max_tokens_per_micro_batch"),
    *("packing", "save_freq", "validate_every"),
)


def _common_offline(section: str, *own: str) -> tuple[str, ...]:
    """Return what most people set of a training on rows; `own`: only of this one."""
    training = (f"{section}.{name}" for name in (*own, *_COMMON_OFFLINE))
    data = ("data.columns", "data.val_size", "data.max_length", "data.too_long")
    return (*_COMMON, *data, *training, *_COMMON_RUN)


PPO = Form(
    "main_ppo",
    settings.RunConfig,
    "rl.",
    keys={**dict.fromkeys(_REWARD_KEYS), **_KEYWORDS},
    finish=_finish_ppo,
    complete=settings.fill_layouts,
    common=(*_COMMON, *_COMMON_RL, *_COMMON_RUN),
)
SFT = Form(
    "main_sft",
    settings.SFTRunConfig,
    keys=dict.fromkeys(_SFT_KEYS),
    finish=_finish_sft,
    common=_common_offline("sft"),
)
PREFERENCE = Form(
    "main_preference",
    settings.PreferenceRunConfig,
    common=_common_offline("preference", "loss", "beta"),
)
REWARD_MODEL = Form(
    "main_reward_model",
    settings.RewardModelRunConfig,
    common=_common_offline("reward_model", "head"),
)
ALL = (PPO, SFT, PREFERENCE, REWARD_MODEL)


def check_names(config: settings.RunConfig | settings.OfflineRunConfig) -> None:
    """Raise an EngineError for the first setting whose value isn't there, without torch and Ray."""
    if not config.model.path:
        is_rl = isinstance(config, settings.RunConfig)
        key = "actor_rollout_ref.model.path" if is_rl else "model.path"
        raise ConfigError(f"{key} is missing; give a Hugging Face folder or hub id")
    if not config.data.train_files:
        raise ConfigError("data.train_files is missing; give a JSONL, JSON, CSV or Parquet file")
    for file in (*config.data.train_files, *config.data.val_files):
        if not is_remote(file) and not as_path(file).exists():
            raise DataError(f"{file} does not exist; check the path")
    require_packages(config.run.logger, "run.logger")
    if isinstance(config, settings.RunConfig):
        import_plugins(config.rl.plugins)
        require_rewards(config.rl.reward)
        for setting, teacher in config.rl.algorithm.teacher_models.items():
            pin_revision(teacher, setting)
        if config.rl.critic.model_path:
            pin_revision(config.rl.critic.model_path, "rl.critic.model_path")
        if config.run.val_only and not config.data.val_files:
            raise ConfigError("run.val_only=true has nothing to validate on; give data.val_files")
        if config.run.resume_mode == "resume_path" and not config.rl.trainer.resume_from:
            raise ConfigError("run.resume_mode=resume_path needs trainer.resume_from_path")
    pin_revision(config.model.path)
    if config.model.trust_remote_code:
        refuse_own_code(config.model.path)
