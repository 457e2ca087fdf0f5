"""`Trainer.from_hf_config(…)`, and settings of other libraries as a run's configuration.

Dictionaries have the keys of `main_ppo` (verl's and this project's, dotted or in sections), or the
short names of `engine/cli/verl_keys.yaml`. `TrainingArguments`, `LoraConfig` and
`BitsAndBytesConfig` are read by attribute, so transformers and peft aren't needed here; what
changes the result and has no setting is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from engine.cli import forms
from engine.cli.resolve import Resolved, resolve_pairs
from engine.cli.settings import RunConfig
from engine.cli.verl_keys import key_table
from engine.cli.verl_keys import verl_defaults as defaults_of_verl
from engine.config.text import read_yaml
from engine.console import say
from engine.errors import ConfigError

_FORM = replace(forms.PPO, more_sections=("short",))
_ALGORITHMS = {
    "ppo": "gae",
    "reinforce": "reinforce_plus_plus",
    "reinforce++": "reinforce_plus_plus",
}
_UNAVAILABLE_LORA = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern")
Row = tuple[str, object, str, object]  # an attribute and its value, our setting and its value


def read_settings(
    values: Mapping[str, object], algorithm: str | None = None
) -> Resolved[RunConfig]:
    """Return the configuration that `values` make.

    `algorithm` is `ppo`, `grpo`, or an estimator's name. Raises ConfigError in the words of
    `values`.
    """
    pairs = [pair for key, value in values.items() for pair in _FORM.flatten(value, str(key))]
    return resolve_pairs(_FORM, [*pairs, *_estimator(algorithm)])


def _estimator(algorithm: str | None) -> list[tuple[str, object]]:
    if algorithm is None:
        return []
    return [("algorithm.adv_estimator", _ALGORITHMS.get(algorithm.lower(), algorithm))]


class Trainer:
    """A run of `python -m engine.main_ppo` from Python: a model, a file of settings, and `train()`.

    The result is as on the command line: models, checkpoints and metrics in
    `trainer.default_local_dir`.

    Examples:
        >>> Trainer.from_hf_config("Qwen/Qwen2.5-0.5B", config_path="ppo.yaml").train()
    """

    def __init__(self, resolved: Resolved[RunConfig]) -> None:
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
        """Make the run of a model (folder or hub id) and a YAML file with the keys of `main_ppo`.

        `args` are transformers' TrainingArguments, `peft_config` a LoraConfig,
        `quantization_config` a BitsAndBytesConfig; what became of them is printed. `settings` are
        sections or settings, and win. Raises ConfigError for a wrong one.
        """
        pairs: list[tuple[str, object]] = []
        if config_path:
            file = Path(config_path).expanduser()
            pairs += _FORM.flatten(read_yaml(file, f"config file {file}"))
        rows: list[Row] = []
        for settings_object, read in (
            (args, training_arguments),
            (peft_config, lora_config),
            (quantization_config, bits_and_bytes_config),
        ):
            rows += read(settings_object) if settings_object is not None else []
        width = max((len(f"{name}={value}") for name, value, _, _ in rows), default=0)
        for name, value, path, setting in rows:
            shown = path.removeprefix("rl.") + ("" if value == setting else f"={setting}")
            say(f"  {f'{name}={value}':<{width}}  →  {shown}")
            pairs.append((path, setting))
        for key, value in settings.items():
            pairs += _FORM.flatten(value, key)
        pairs += [*_estimator(algo), ("actor_rollout_ref.model.path", str(model))]
        defaults = defaults_of_verl(pairs) if verl_defaults else []
        return cls(resolve_pairs(_FORM, [*defaults, *pairs]))

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        return self._resolved.config

    def train(self) -> Path:
        """Train, validate, save; return the folder of the model. Raises an EngineError."""
        from engine.cli.ppo_program import run

        for notice in self._resolved.grouped_notices():
            say(f"note: {notice}", error=True)
        forms.check_names(self.config)
        return run(self.config)


def training_arguments(arguments: object) -> list[Row]:
    """Return what becomes of a `TrainingArguments`, where it has other values than its defaults.

    Its batch size is of rows a device in a step of the optimizer; here it is prompts of a step.
    Raises ConfigError for an optimizer other than AdamW and SGD.
    """
    fields = getattr(type(arguments), "__dataclass_fields__", {}).values()
    defaults = {field.name: field.default for field in fields}

    def changed(name: str) -> Any:
        value: Any = getattr(arguments, name, None)
        return None if value == defaults.get(name) or value == "" else value

    rows: list[Row] = []
    for name, key in key_table("training_arguments").settings.items():
        value = changed(name)
        if value is not None and not (name == "max_steps" and value <= 0):
            value = key.convert(value, name)
            rows.append((name, value, key.paths[0], value))
    if (per_device := changed("per_device_train_batch_size")) is not None:
        size = per_device * int(getattr(arguments, "gradient_accumulation_steps", 1) or 1)
        shown = "per_device_train_batch_size × accumulation"
        rows.append((shown, size, "trainer.train_batch_size", size))
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if getattr(arguments, flag, False):
            rows.append((flag, True, "model.dtype", dtype))
    optim = getattr(arguments, "optim", "")
    optimizer = str(getattr(optim, "value", optim))
    if optimizer == "sgd":
        rows.append(("optim", optimizer, "actor.optim.optimizer", "SGD"))
    elif optimizer and not optimizer.startswith("adamw_torch"):
        raise ConfigError(
            f"TrainingArguments.optim={optimizer!r} is not available here; use adamw_torch or sgd"
        )
    return rows


def lora_config(config: Any) -> list[Row]:
    """Return what becomes of peft's `LoraConfig`; ConfigError for what isn't here."""
    for name in _UNAVAILABLE_LORA:
        if getattr(config, name, None):
            raise ConfigError(f"LoraConfig.{name}={getattr(config, name)!r} is not available here")
    if getattr(config, "bias", "none") != "none":
        raise ConfigError(f"LoraConfig.bias={config.bias!r} is not available here; use 'none'")
    values = {"r": config.r, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
    paths = ("model.lora.rank", "model.lora.alpha", "model.lora.dropout")
    rows: list[Row] = [(n, v, p, v) for (n, v), p in zip(values.items(), paths, strict=True)]
    if modules := config.target_modules:
        modules = modules if isinstance(modules, str) else sorted(modules)
        if isinstance(modules, str) and modules != "all-linear":
            raise ConfigError(f"LoraConfig.target_modules={modules!r} is a pattern; list the names")
        rows.append(("target_modules", modules, "model.lora.target_modules", modules))
    return rows


def bits_and_bytes_config(config: object) -> list[Row]:
    """Return what becomes of a `BitsAndBytesConfig`: nf4 or int8; ConfigError for fp4."""
    if getattr(config, "load_in_4bit", False):
        kind = str(getattr(config, "bnb_4bit_quant_type", "nf4"))
        if kind != "nf4":
            raise ConfigError(f"bnb_4bit_quant_type={kind!r} is not available here; use 'nf4'")
        return [("load_in_4bit", True, "model.lora.quantize", "nf4")]
    if getattr(config, "load_in_8bit", False):
        return [("load_in_8bit", True, "model.lora.quantize", "int8")]
    return []
