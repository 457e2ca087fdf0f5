"""`Trainer.from_hf_config("Qwen/…", config_path="ppo.yaml").train()`: a run of `main_ppo` as an
object."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from engine.cli.check_names import check_names
from engine.cli.resolve import Resolved, flatten, read_yaml, resolve_pairs
from engine.cli.settings import RunConfig
from engine.compat.hf_settings import (
    Row,
    lora_config,
    quantization_config,
    table,
    training_arguments,
)
from engine.compat.settings import ALGORITHMS
from engine.console import say


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
        from engine.cli.run import run

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
