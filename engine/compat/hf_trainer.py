"""`Trainer.from_hf_config(…)`, and settings of other libraries as a run's configuration.

Dictionaries have the keys of `main_ppo`, or the short names of `engine/cli/verl_keys.yaml`, which
also says which attributes of `TrainingArguments` and the like are read or refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from engine.cli import forms
from engine.cli.resolve import Resolved, key_table, resolve_pairs
from engine.cli.settings import RunConfig
from engine.config.text import read_yaml
from engine.console import say
from engine.errors import ConfigError

_FORM = replace(forms.PPO, more_sections=("short",))
_PLUS_PLUS = "reinforce_plus_plus"
_ALGORITHMS = {"ppo": "gae", "reinforce": _PLUS_PLUS, "reinforce++": _PLUS_PLUS}


def read_settings(
    values: Mapping[str, object], algorithm: str | None = None
) -> Resolved[RunConfig]:
    """Return the configuration of `values` and an algorithm: `ppo`, `grpo`, an estimator's name.

    Raises ConfigError in the words of `values`.
    """
    pairs = [pair for key, value in values.items() for pair in _FORM.flatten(value, str(key))]
    return resolve_pairs(_FORM, [*pairs, *_estimator(algorithm)])


def _estimator(algorithm: str | None) -> list[tuple[str, object]]:
    if algorithm is None:
        return []
    return [("algorithm.adv_estimator", _ALGORITHMS.get(algorithm.lower(), algorithm))]


class Trainer:
    """A run of `python -m engine.main_ppo` from Python, with the same results in its folder.

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
        rows = [
            *_settings_of(args, "training_arguments"),
            *_settings_of(peft_config, "lora_config"),
            *_settings_of(quantization_config, "bits_and_bytes_config"),
        ]
        width = max((len(theirs) for theirs, _, _ in rows), default=0)
        for theirs, path, setting in rows:
            say(f"  {theirs:<{width}}  →  {path.removeprefix('rl.')}={setting}")
            pairs.append((path, setting))
        for key, value in settings.items():
            pairs += _FORM.flatten(value, key)
        pairs += [*_estimator(algo), ("actor_rollout_ref.model.path", str(model))]
        return cls(resolve_pairs(_FORM, pairs, defaults_of_verl=verl_defaults))

    @property
    def config(self) -> RunConfig:
        return self._resolved.config

    def train(self) -> Path:
        """Train, validate, save; return the folder of the model. Raises an EngineError."""
        from engine.cli.ppo_program import run

        for notice in self._resolved.grouped_notices():
            say(f"note: {notice}", error=True)
        forms.check_names(self.config)
        return run(self.config)


def _settings_of(settings: Any, section: str) -> Iterator[tuple[str, str, object]]:
    """Yield `name=value` of what was set, our path and our value; refuse what the table does."""
    if settings is None:
        return
    table, defaults = key_table(section), dict[str, object]()
    if section == "training_arguments":
        fields = getattr(type(settings), "__dataclass_fields__", {}).values()
        defaults = {field.name: field.default for field in fields}

    def changed(name: str) -> Any:
        value = getattr(settings, name, None)
        value = sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        return None if value == defaults.get(name) or value == "" else value

    for entry in table.unsupported:
        value = changed(entry.pattern)
        if value is not None and value not in entry.accepted:
            given = f"{type(settings).__name__}.{entry.pattern}={value!r}"
            raise ConfigError(f"{given} is not available here; {entry.reason}")
    for name, key in table.settings.items():
        if (value := changed(name)) is not None and (ours := key.convert(value, name)) != "":
            yield f"{name}={value}", key.paths[0], ours
    if (rows := changed("per_device_train_batch_size")) is not None:
        rows *= settings.gradient_accumulation_steps  # of a device; here prompts of a step
        shown = f"per_device_train_batch_size × accumulation={rows}"
        yield shown, "trainer.train_batch_size", rows
    kind = getattr(settings, "bnb_4bit_quant_type", "nf4")
    if getattr(settings, "load_in_4bit", False) and kind != "nf4":
        raise ConfigError(f"bnb_4bit_quant_type={kind!r} is not available here; use 'nf4'")
