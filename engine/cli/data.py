"""The rows of a run's data files, checked before any worker starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.cli.settings import DataFilesConfig, RunConfig
from engine.data.control_tokens import rows_spelling_control_tokens
from engine.data.loader import PromptLoader, add_prompt_ids, frame_of
from engine.data.row_files import data_files, read_file_rows
from engine.data.templates import with_template_variables
from engine.errors import ConfigError, DataError
from engine.storage.json_rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows that a run doesn't take, and rows that spell control tokens."""

    long: int = 0  # prompts over data.max_prompt_length
    control_tokens: int = 0  # rows that spell control tokens, left out or not
    bad: tuple[str, ...] = ()  # what bad rows were left out, a sentence a file

    def __add__(self, other: LeftOut) -> LeftOut:
        spelled = self.control_tokens + other.control_tokens
        return LeftOut(self.long + other.long, spelled, self.bad + other.bad)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts for training and validation."""

    loader: PromptLoader
    validation: list[Row]
    longest: int  # prompt of both, in tokens
    left_out: LeftOut


def read_prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> Prompts:
    """Read all files; raise DataError or ConfigError for rows and settings that don't fit.

    `context` is the model's limit in tokens.
    """
    data = config.data
    tokenizer = with_template_variables(tokenizer, data.apply_chat_template_kwargs)
    train, left_out = _rows(data, data.train_files, tokenizer, context, "data.train_files")
    train = _at_most(train, data.train_max_samples, config)
    batch = config.rl.trainer.train_batch_size
    if batch > len(train):
        raise ConfigError(
            f"rl.trainer.train_batch_size={batch} is more than the {len(train)} rows of "
            "data.train_files; lower it"
        )
    validation: list[Row] = []
    if data.val_files:
        validation, more = _rows(data, data.val_files, tokenizer, context, "data.val_files")
        left_out += more
        validation = _at_most(validation, data.val_max_samples, config)
    longest = max(len(row.pop("prompt_ids")) for row in [*train, *validation])
    loader = PromptLoader(
        frame_of(train),
        batch,
        config.seed,
        data.shuffle,
        data.sampling,
        data.apply_chat_template_kwargs,
        data.cut,
    )
    return Prompts(loader, validation, longest, left_out)


def _at_most(rows: list[Row], count: int, config: RunConfig) -> list[Row]:
    """`count` of the rows (-1: all), the first, or with `data.shuffle` some drawn by the seed."""
    if count < 1 or count >= len(rows):
        return rows
    if not config.data.shuffle:
        return rows[:count]
    chosen = random.Random(config.seed).sample(range(len(rows)), count)
    return [rows[i] for i in sorted(chosen)]


def _rows(
    data: DataFilesConfig,
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    key: str,
) -> tuple[list[Row], LeftOut]:
    """The rows of all files, and what was left out of them."""
    if not files:
        raise ConfigError(
            f"{key} is missing; give one JSONL, JSON, CSV or Parquet file, or a list of them"
        )
    limit, way_out = data.max_prompt_length, "raise data.max_prompt_length"
    if limit and data.filter_overlong_prompts:
        way_out = ""
    if not limit:
        limit = context
        way_out = "leave them out with data.max_prompt_length and data.filter_overlong_prompts"
    rows: list[Row] = []
    left_out = LeftOut()
    for path in [path for file in files for path in data_files(_expanded(file))]:
        found = read_file_rows(path, data)
        some, numbers = found.rows, found.numbers
        left_out += LeftOut(bad=tuple(filter(None, [found.bad.sentence()])))
        if not some:
            continue
        _check_alike(rows or some, some, path, key)
        spelled = set(
            rows_spelling_control_tokens(some, tokenizer, data.control_tokens, path, numbers)
        )
        left_out += LeftOut(control_tokens=len(spelled))
        if data.control_tokens == "drop":
            kept = [i for i in range(len(some)) if i not in spelled]
            some, numbers = [some[i] for i in kept], [numbers[i] for i in kept]
        add_prompt_ids(some, tokenizer, limit, path, way_out, numbers, data.cut)
        rows += some
    _require_rows(rows, left_out, key)
    short = [row for row in rows if row["prompt_ids"] is not None]
    if not short:
        raise DataError(
            f"{key}: all {len(rows)} prompts are longer than data.max_prompt_length={limit} "
            "tokens; raise it"
        )
    return short, left_out + LeftOut(long=len(rows) - len(short))


def _expanded(file: str) -> str:
    return file if "://" in file else str(Path(file).expanduser())


def _require_rows(rows: Sequence[Row], left_out: LeftOut, key: str) -> None:
    if rows:
        return
    if left_out.control_tokens:
        raise DataError(
            f"{key}: all {left_out.control_tokens} rows spell control tokens of the model, and "
            "data.control_tokens=drop leaves them out; correct them, or set it to escape"
        )
    raise DataError(f"{key}: no row is left; {left_out.bad[0]}")


def _check_alike(before: Sequence[Row], rows: Sequence[Row], path: str, key: str) -> None:
    """Raise DataError where a file has other columns than those before it."""
    if other := (before[0].keys() ^ rows[0].keys()) - {"prompt_ids"}:
        raise DataError(
            f"{path} has other columns than the file before it in {key}: "
            f"{sorted(other)} are in one only; make them equal"
        )
    has, had = (some[0]["reward_model"]["ground_truth"] is not None for some in (rows, before))
    if has != had:
        raise DataError(
            f"{path} has {'' if has else 'no '}ground truths and the file before it in {key} has "
            f"{'some' if had else 'none'}; give reward_model.ground_truth in all files or in none"
        )
