"""The configurations of `main_preference` and `main_reward_model`, and the arguments they take.

Keys are the paths of the settings; those of `main_ppo`, which has verl's names too, are in
`resolve`.
"""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin

from pydantic import BaseModel, Field, ValidationError

from engine.cli.resolve import read_yaml, split_argument
from engine.cli.settings import PolicyModelConfig, RunOutputConfig
from engine.config import (
    OfflineConfig,
    Options,
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    RowsConfig,
    Section,
    SFTConfig,
    explain,
)
from engine.config.base import section_of
from engine.errors import ConfigError


class PreferenceFilesConfig(Section):
    """The preferences: rows of files."""

    train_files: tuple[str, ...] = Field(
        (), description="Files to learn from: JSONL, JSON, CSV, Parquet; paths, s3://… or hf://ID"
    )
    val_files: tuple[str, ...] = Field((), description="Files of held-out rows")
    val_size: int = Field(
        0, ge=0, description="Without val_files: training rows to hold out, prompts in one piece"
    )
    columns: dict[str, str] = Field(
        {},
        description="Our column (prompt, chosen, rejected, margin; completion, label; completions, "
        "labels): the files' column, e.g. {chosen: better}; info.answer is the field answer of "
        "the column info",
    )
    templates: dict[str, str] = Field(
        {}, description="Our column: a Jinja2 template of it over the files' columns"
    )
    system_prompt: str = Field("", description="System message of prompts that have none")
    apply_chat_template_kwargs: Options = Field(
        {}, description="Variables of the model's chat template, e.g. {enable_thinking: false}"
    )
    bad_rows: Literal["fail", "drop"] = Field(
        "fail", description="Rows that are no preference: refuse them by number, or leave them out"
    )
    max_length: int = Field(
        0, ge=0, description="Longest prompt and response in tokens; 0: the model's context"
    )
    too_long: Literal["fail", "drop"] = Field(
        "fail", description="Longer ones: refuse them, or leave them out"
    )

    def rows(self) -> RowsConfig:
        """How rows of files become prompts and responses."""
        return RowsConfig(
            columns=self.columns,
            templates=self.templates,
            system_prompt=self.system_prompt,
            apply_chat_template_kwargs=self.apply_chat_template_kwargs,
            bad_rows=self.bad_rows,
        )


class OfflineRunConfig(Section):
    """A run from files on this machine."""

    seed: int = Field(0, ge=0, description="Order of the rows, new adapters, dropout")
    data: PreferenceFilesConfig = PreferenceFilesConfig()
    model: PolicyModelConfig = PolicyModelConfig()
    run: RunOutputConfig = RunOutputConfig()

    @property
    @abstractmethod
    def training(self) -> OfflineConfig:
        """The section of the training itself."""


class PreferenceOutputConfig(RunOutputConfig):
    """What the run records, and where it leaves it."""

    experiment_name: str = Field("preference", min_length=1, description="Name of the run there")


class RewardModelOutputConfig(RunOutputConfig):
    """What the run records, and where it leaves it."""

    experiment_name: str = Field("reward_model", min_length=1, description="Name of the run there")


class PreferenceRunConfig(OfflineRunConfig):
    """All of it."""

    preference: PreferenceTrainingConfig = PreferenceTrainingConfig()
    run: PreferenceOutputConfig = PreferenceOutputConfig()

    @property
    def training(self) -> PreferenceTrainingConfig:
        return self.preference


class SFTOutputConfig(RunOutputConfig):
    """What the run records, and where it leaves it."""

    experiment_name: str = Field("sft", min_length=1, description="Name of the run there")


class SFTRunConfig(OfflineRunConfig):
    """All of it."""

    sft: SFTConfig = SFTConfig()
    run: SFTOutputConfig = SFTOutputConfig()

    @property
    def training(self) -> SFTConfig:
        return self.sft


class RewardModelRunConfig(OfflineRunConfig):
    """All of it."""

    reward_model: RewardModelTrainingConfig = RewardModelTrainingConfig()
    run: RewardModelOutputConfig = RewardModelOutputConfig()

    @property
    def training(self) -> RewardModelTrainingConfig:
        return self.reward_model


R = TypeVar("R", bound=OfflineRunConfig)
Pairs = list[tuple[str, object]]  # dotted keys with their values


def read_run_config(
    root: type[R],
    program: str,
    file: Path | None,
    arguments: Sequence[str],
    renamed: Callable[[Pairs], Pairs] = lambda pairs: pairs,
) -> R:
    """Read `file`, put the `key=value` arguments on top, and check all of it.

    `renamed` puts our keys in place of others. Raises ConfigError that names the key, and for one
    that is unknown the nearest.
    """
    settings, values = dict(_walk(root, "")), dict[str, Any]()
    pairs = list(_flat(read_yaml(file), settings)) if file else []
    for argument in arguments:
        key, value = split_argument(argument)
        pairs.extend(_flat(value, settings, key))
    for key, value in renamed(pairs):
        if key not in settings and get_origin(settings.get(key.rpartition(".")[0])) is not dict:
            near = difflib.get_close_matches(key, sorted(settings), n=1, cutoff=0.5)
            way_out = f"did you mean {near[0]}?" if near else f"{program} --help lists all keys"
            raise ConfigError(f"unknown key {key!r}; {way_out}")
        place = values
        *sections, name = key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = [value] if key in _LISTS and isinstance(value, str) else value
        if value is None:  # the default
            del place[name]
    try:
        return root.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


_LISTS = ("data.train_files", "data.val_files", "run.logger")


def _flat(value: object, settings: Container[str], key: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys of nested sections; a setting that is a mapping stays whole."""
    if not isinstance(value, dict) or key in settings:
        yield key, value
        return
    for name, inner in value.items():
        yield from _flat(inner, settings, f"{key}.{name}" if key else str(name))


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, object]]:
    for name, info in model.model_fields.items():
        section = section_of(info.annotation)
        if section is not None:
            yield from _walk(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info.annotation
