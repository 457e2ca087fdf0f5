"""transformers' and peft's objects of settings as a run's: `TrainingArguments`, `LoraConfig`,
`BitsAndBytesConfig`.

They are read by attribute, so none of the libraries is needed here. What changes the result and has
no setting is refused; what became of each is a row of a table.
"""

from __future__ import annotations

from typing import Any

from engine.errors import ConfigError

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
