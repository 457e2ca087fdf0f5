"""`Trainer.from_hf_config(…)`, and settings of other libraries as a run's configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from engine.cli.resolve import Resolved, check_names, flatten, known_keys, read_yaml, resolve_pairs
from engine.cli.settings import RunConfig
from engine.console import say
from engine.errors import ConfigError

# A dictionary of settings as articles and other libraries write it, as a run's configuration.
#
# Keys are those of `main_ppo`, dotted or in sections (verl's and this project's), or one of the
# short
# names below. A wrong one is an error that names the nearest.

ALGORITHMS = {
    "ppo": "gae",
    "reinforce": "reinforce_plus_plus",
    "reinforce++": "reinforce_plus_plus",
}

# Short names, and the settings that they are.
SHORT: dict[str, str] = {
    "lr": "actor.optim.lr",
    "learning_rate": "actor.optim.lr",
    "actor_lr": "actor.optim.lr",
    "critic_lr": "critic.optim.lr",
    "weight_decay": "actor.optim.weight_decay",
    "warmup_steps": "actor.optim.warmup_steps",
    "warmup_ratio": "actor.optim.warmup_ratio",
    "lr_scheduler_type": "actor.optim.schedule",
    "max_grad_norm": "actor.optim.grad_clip",
    "grad_clip": "actor.optim.grad_clip",
    "batch_size": "trainer.train_batch_size",
    "train_batch_size": "trainer.train_batch_size",
    "rollout_batch_size": "trainer.train_batch_size",
    "mini_batch_size": "actor.ppo_mini_batch_size",
    "ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    "ppo_epochs": "actor.ppo_epochs",
    "num_generations": "rollout.n",
    "n_samples_per_prompt": "rollout.n",
    "group_size": "rollout.n",
    "n": "rollout.n",
    "max_new_tokens": "data.max_response_length",
    "max_completion_length": "data.max_response_length",
    "max_response_length": "data.max_response_length",
    "response_length": "data.max_response_length",
    "max_prompt_length": "data.max_prompt_length",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "rollout_engine": "rollout.engine",
    "engine": "rollout.engine",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "kl_coef": "actor.kl_loss_coef",
    "init_kl_coef": "actor.kl_loss_coef",
    "kl_loss_coef": "actor.kl_loss_coef",
    "beta": "actor.kl_loss_coef",
    "clip_ratio": "actor.clip_ratio",
    "clip_range": "actor.clip_ratio",
    "cliprange": "actor.clip_ratio",
    "epsilon": "actor.clip_ratio",
    "cliprange_value": "critic.cliprange_value",
    "entropy_coef": "actor.entropy_coeff",
    "entropy_coeff": "actor.entropy_coeff",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "gae_lambda": "algorithm.lam",
    "adv_estimator": "algorithm.adv_estimator",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "dtype": "model.dtype",
    "total_steps": "trainer.total_training_steps",
    "total_training_steps": "trainer.total_training_steps",
    "max_steps": "trainer.total_training_steps",
    "num_steps": "trainer.total_training_steps",
    "save_freq": "trainer.save_freq",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "placement": "trainer.placement",
    "threads": "trainer.threads",
}


def read_settings(values: Mapping[str, object], algorithm: str | None = None) -> Resolved:
    """The configuration that `values` make; `algorithm` is `ppo`, `grpo`, or an estimator's name.

    Raises ConfigError in the words of `values`.
    """
    pairs = list(_pairs(values))
    if algorithm is not None:
        name = ALGORITHMS.get(algorithm.lower(), algorithm)
        pairs.append(("algorithm.adv_estimator", name))
    return resolve_pairs(pairs)


def _pairs(values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        name = str(key)
        if name in SHORT and not isinstance(value, Mapping):
            yield SHORT[name], value
            continue
        if isinstance(value, Mapping) or "." in name or name in known_keys():
            yield from flatten(dict(value) if isinstance(value, Mapping) else value, name)
            continue
        near = difflib.get_close_matches(name, [*SHORT, *known_keys()], n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"config has no setting {name!r}{hint}")


# transformers' and peft's objects of settings as a run's: `TrainingArguments`, `LoraConfig`,
# `BitsAndBytesConfig`.
#
# They are read by attribute, so none of the libraries is needed here. What changes the result and
# has
# no setting is refused; what became of each is a row of a table.

# Of TrainingArguments: the setting, and a converter.
_ARGUMENTS: dict[str, str] = {
    "learning_rate": "actor.optim.lr",
    "weight_decay": "actor.optim.weight_decay",
    "adam_beta1": "actor.optim.beta1",
    "adam_beta2": "actor.optim.beta2",
    "max_grad_norm": "actor.optim.grad_clip",
    "warmup_ratio": "actor.optim.warmup_ratio",
    "warmup_steps": "actor.optim.warmup_steps",
    "lr_scheduler_type": "actor.optim.schedule",
    "max_steps": "trainer.total_training_steps",
    "num_train_epochs": "run.total_epochs",
    "seed": "seed",
    "output_dir": "run.default_local_dir",
    "run_name": "run.experiment_name",
    "gradient_checkpointing": "actor.parallel.activation_checkpointing",
}
_SCHEDULES = {"constant_with_warmup": "constant"}
_LORA = {
    "r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
}
Row = tuple[str, object, str]  # theirs, its value, ours


def training_arguments(arguments: object) -> tuple[dict[str, object], list[Row]]:
    """The settings of a `TrainingArguments`, and the rows of the table.

    Its batch size is of rows a device in a step of the optimizer; here it is prompts of a step.
    Raises ConfigError for an optimizer other than AdamW and SGD and a schedule that there is not.
    """
    settings: dict[str, object] = {}
    rows: list[Row] = []
    defaults = {
        f.name: f.default for f in getattr(type(arguments), "__dataclass_fields__", {}).values()
    }
    for theirs, ours in _ARGUMENTS.items():
        value: Any = getattr(arguments, theirs, None)
        if value is None or value == defaults.get(theirs) or value == "":
            continue
        if theirs == "max_steps" and value <= 0:
            continue
        if theirs == "lr_scheduler_type":
            name = str(getattr(value, "value", value))
            value = _SCHEDULES.get(name, name)
        if theirs == "num_train_epochs":
            value = max(1, round(value))
        settings[ours] = value
        rows.append((theirs, value, ours))
    per_device = getattr(arguments, "per_device_train_batch_size", None)
    if per_device is not None and per_device != defaults.get("per_device_train_batch_size"):
        size = per_device * int(getattr(arguments, "gradient_accumulation_steps", 1) or 1)
        settings["trainer.train_batch_size"] = size
        rows.append(
            ("per_device_train_batch_size × accumulation", size, "trainer.train_batch_size")
        )
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if getattr(arguments, flag, False):
            settings["model.dtype"] = dtype
            rows.append((flag, True, f"model.dtype={dtype}"))
    optim = getattr(arguments, "optim", "")
    optimizer = str(getattr(optim, "value", optim))
    if optimizer == "sgd":
        settings["actor.optim.optimizer"] = "SGD"
        rows.append(("optim", optimizer, "actor.optim.optimizer=SGD"))
    elif optimizer and not optimizer.startswith("adamw_torch"):
        raise ConfigError(
            f"TrainingArguments.optim={optimizer!r} is not available here; use adamw_torch or sgd"
        )
    return settings, rows


def lora_config(config: Any) -> tuple[dict[str, object], list[Row]]:
    """The settings of peft's `LoraConfig`.

    Raises ConfigError for what changes the result and isn't here.
    """
    for name in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if getattr(config, name, None):
            raise ConfigError(f"LoraConfig.{name}={getattr(config, name)!r} is not available here")
    if getattr(config, "bias", "none") != "none":
        raise ConfigError(f"LoraConfig.bias={config.bias!r} is not available here; use 'none'")
    settings = {ours: getattr(config, theirs) for theirs, ours in _LORA.items()}
    modules = config.target_modules
    if modules:
        named = modules if isinstance(modules, str) else sorted(modules)
        if isinstance(named, str) and named != "all-linear":
            raise ConfigError(f"LoraConfig.target_modules={named!r} is a pattern; list the names")
        settings["model.lora.target_modules"] = named
    theirs = {v: k for k, v in _LORA.items()} | {"model.lora.target_modules": "target_modules"}
    return settings, [(theirs[ours], value, ours) for ours, value in settings.items()]


def quantization_config(config: object) -> tuple[dict[str, object], list[Row]]:
    """The settings of a `BitsAndBytesConfig`: nf4 or int8; ConfigError for fp4."""
    if getattr(config, "load_in_4bit", False):
        kind = str(getattr(config, "bnb_4bit_quant_type", "nf4"))
        if kind != "nf4":
            raise ConfigError(f"bnb_4bit_quant_type={kind!r} is not available here; use 'nf4'")
        return {"model.lora.quantize": "nf4"}, [("load_in_4bit", True, "model.lora.quantize=nf4")]
    if getattr(config, "load_in_8bit", False):
        return {"model.lora.quantize": "int8"}, [("load_in_8bit", True, "model.lora.quantize=int8")]
    return {}, []


def table(rows: list[Row]) -> list[str]:
    """What became what, in lines."""
    width = max((len(f"{name}={value}") for name, value, _ in rows), default=0)
    return [f"  {f'{name}={value}':<{width}}  →  {ours}" for name, value, ours in rows]


# `Trainer.from_hf_config("Qwen/…", config_path="ppo.yaml").train()`: a run of `main_ppo` as an
# object.


class Trainer:
    """A run of `python -m engine.main_ppo` from Python: a model, a file of settings, and `train()`.

    The result is as on the command line: models, checkpoints and metrics in
    `trainer.default_local_dir`.
    """

    def __init__(self, resolved: Resolved) -> None:
        """Made by `from_hf_config`."""
        self._resolved = resolved

    @classmethod
    def from_hf_config(
        cls,
        model: str | Path,
        config_path: str | Path | None = None,
        *,
        args: object = None,
        peft_config: object = None,
        quantization_config: object = None,
        algo: str | None = None,
        verl_defaults: bool = False,
        **settings: object,
    ) -> Self:
        """The run of a model (folder or hub id) and a YAML file with the keys of `main_ppo`.

        `args` are transformers' TrainingArguments, `peft_config` a LoraConfig,
        `quantization_config` a BitsAndBytesConfig; what became of them is printed. `settings` are
        sections or settings, and win. Raises ConfigError for a wrong one.
        """
        pairs = list(flatten(read_yaml(Path(config_path).expanduser()))) if config_path else []
        found = _of_objects(args, peft_config, quantization_config)
        pairs += found.items()
        for key, value in settings.items():
            pairs += flatten(value, key)
        if algo is not None:
            pairs.append(("algorithm.adv_estimator", ALGORITHMS.get(algo.lower(), algo)))
        pairs.append(("actor_rollout_ref.model.path", str(model)))
        return cls(resolve_pairs(pairs, verl_defaults=verl_defaults))

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        return self._resolved.config

    def train(self) -> Path:
        """Train, validate, save; return the folder of the model. Raises an EngineError."""
        from engine.cli.ppo_program import run

        for notice in self._resolved.grouped_notices():
            say(f"note: {notice}", error=True)
        check_names(self.config)
        return run(self.config)


def _of_objects(arguments: object, peft: object, quantization: object) -> dict[str, object]:
    """The settings of the libraries' objects; prints what became of them."""
    settings: dict[str, object] = {}
    rows: list[Row] = []
    for given, read in (
        (arguments, training_arguments),
        (peft, lora_config),
        (quantization, quantization_config),
    ):
        if given is not None:
            some, told = read(given)
            settings |= some
            rows += told
    for line in table(rows):
        say(line)
    return settings
