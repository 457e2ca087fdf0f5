"""The configurations of training on rows and the arguments they take, verl's SFT keys included.

Arguments and help of the programs are in `offline_program`, the run is in `offline_run`.
"""

from __future__ import annotations

import difflib
import os
from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from fnmatch import fnmatchcase
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
from engine.console import say
from engine.errors import ConfigError

# The configurations of `main_preference` and `main_reward_model`, and the arguments they take.
#
# Keys are the paths of the settings; those of `main_ppo`, which has verl's names too, are in
# `resolve`.


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


# verl's keys of supervised fine-tuning as those of `main_sft`.
#
# Both names of a setting are taken. A key that changes no result is printed and left out; one that
# would, and that there is no setting for, is rejected.

# verl's key: ours.
_NAMES = {
    "model.partial_pretrain": "model.path",
    "model.lora_rank": "model.lora.rank",
    "model.lora_alpha": "model.lora.alpha",
    "model.target_modules": "model.lora.target_modules",
    "model.enable_gradient_checkpointing": "sft.parallel.activation_checkpointing",
    "data.train_batch_size": "sft.train_batch_size",
    "optim.lr": "sft.optim.lr",
    "optim.weight_decay": "sft.optim.weight_decay",
    "optim.warmup_steps_ratio": "sft.optim.warmup_ratio",
    "optim.lr_warmup_steps_ratio": "sft.optim.warmup_ratio",
    "optim.clip_grad": "sft.optim.grad_clip",
    "optim.lr_scheduler": "sft.optim.schedule",
    "optim.lr_scheduler_type": "sft.optim.schedule",
    "optim.min_lr_ratio": "sft.optim.min_lr_ratio",
    "optim.num_cycles": "sft.optim.num_cycles",
    "optim.optimizer": "sft.optim.optimizer",
    "ulysses_sequence_parallel_size": "sft.parallel.sp",
    "use_remove_padding": "sft.packing",
    "trainer.default_local_dir": "run.default_local_dir",
    "trainer.project_name": "run.project_name",
    "trainer.experiment_name": "run.experiment_name",
    "trainer.total_epochs": "sft.epochs",
    "trainer.total_training_steps": "sft.max_steps",
    "trainer.logger": "run.logger",
    "trainer.seed": "seed",
    "trainer.save_freq": "sft.save_freq",
    "trainer.test_freq": "sft.validate_every",
    "trainer.resume_mode": "run.resume_mode",
}
_PATHS = ("model.path", "run.default_local_dir", "data.train_files", "data.val_files")
_NEVER = 10**9
_GPU_DEVICES = ("/dev/nvidia0", "/dev/kfd")
# Without effect on the result, and why.
_NOTED = {
    "data.micro_batch_size*": "micro-batches are cut by tokens; see sft.max_tokens_per_micro_batch",
    "data.balance_dp_token": "ranks get equally many rows",
    "model.use_liger": "the model's own kernels are used",
    "model.fsdp_config*": "see sft.parallel",
    "model.strategy": "see sft.parallel",
    "trainer.device": "GPUs are used where there are any",
}
# Rejected but for these values, and the way out.
_REJECTED: dict[str, tuple[tuple[object, ...], str]] = {
    "data.truncation": (("error",), "leave longer rows out with data.too_long=drop"),
    "data.multiturn.enable": ((False,), "rows with `messages` are read as they are; leave it out"),
    "data.multiturn.messages_key": (("messages",), "name the column in data.columns.messages"),
    "data.chat_template": ((), "put it into the model's tokenizer"),
    "data.custom_cls*": ((), "give files, and name their columns in data.columns"),
    "optim.optimizer_impl": (("torch.optim",), "set optim.optimizer to AdamW, Adam or SGD"),
    "model.trust_remote_code": ((False,), "no code of a model's folder is run"),
    "model.external_lib": ((), "there are no plugins here"),
    "trainer.default_hdfs_dir": ((), "copy trainer.default_local_dir when the run is over"),
    "trainer.resume_path": ((), "a run goes on from its own default_local_dir"),
    "trainer.max_ckpt_to_keep": ((), "set sft.max_checkpoints_to_keep"),
}


def renamed(pairs: Pairs) -> Pairs:
    """Our keys in place of verl's; says what has no effect. Raises ConfigError for the rest."""
    given = dict(pairs)
    found: Pairs = [
        (f"data.columns.{name}", column)
        for name in ("prompt", "response")
        if (column := _column(name, given)) != name
    ]
    ranks = 1
    for key, value in given.items():
        if key in ("trainer.n_gpus_per_node", "trainer.nnodes"):
            ranks *= _whole(key, value)
        elif key == "optim.betas":
            found += zip(("sft.optim.beta1", "sft.optim.beta2"), _two(key, value), strict=True)
        elif not _left_out(key, value):
            found.append((_NAMES.get(key, key), _converted(_NAMES.get(key, key), value)))
    if ranks > 1:
        sequence = next((v for k, v in found if k == "sft.parallel.sp"), 1)
        found.append(("sft.parallel.fsdp", ranks // (sequence if isinstance(sequence, int) else 1)))
        if any(map(os.path.exists, _GPU_DEVICES)):
            found.append(("sft.pools", [{"roles": ["sft"], "gpus": 1.0}]))
    return found


def _column(name: str, given: dict[str, object]) -> str:
    """The column of `prompt` or `response`, with the fields inside it, e.g. extra_info.question."""
    column, fields = given.pop(f"data.{name}_key", None), given.pop(f"data.{name}_dict_keys", None)
    inside = fields if isinstance(fields, list) else [fields] if fields else []
    return ".".join(map(str, [column or name, *inside]))


def _left_out(key: str, value: object) -> bool:
    """Whether nothing is lost without the key; ConfigError where something would be."""
    for pattern, why in _NOTED.items():
        if fnmatchcase(key, pattern):
            if value is not None:
                say(f"note: {key} has no effect here: {why}", error=True)
            return True
    for pattern, (accepted, way_out) in _REJECTED.items():
        if fnmatchcase(key, pattern):
            if value is None or value in accepted:
                return True
            raise ConfigError(f"{key}={value!r} is verl's and not available here: {way_out}")
    return False


def _converted(path: str, value: object) -> object:
    if path in ("sft.save_freq", "sft.validate_every") and isinstance(value, int) and value < 1:
        return _NEVER
    if path in _PATHS:
        return _each(os.path.expanduser, value)
    return value


def _each(change: Callable[[str], str], value: object) -> object:
    if isinstance(value, list):
        return [change(one) if isinstance(one, str) else one for one in value]
    return change(value) if isinstance(value, str) else value


def _whole(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key}={value!r} must be a whole number of 1 or more")
    return value


def _two(key: str, value: object) -> list[object]:
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError(f"{key}={value!r} must be a list of two numbers, such as [0.9,0.95]")
    return value
