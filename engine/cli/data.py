"""The rows of a run's data files, checked before any worker starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from engine.cli.settings import RunConfig
from engine.data.loader import PromptLoader, make_rl_data_loader
from engine.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
_ALL = 2**31  # a batch size that takes all rows


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts for training and validation."""

    loader: PromptLoader
    validation: list[Row]
    longest: int  # prompt of both, in tokens
    left_out: int  # rows that were longer than data.max_prompt_length


def read_prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Read all files; raise DataError or ConfigError for rows and settings that don't fit."""
    train, dropped = _rows(config, config.data.train_files, tokenizer, "data.train_files")
    batch = config.rl.trainer.train_batch_size
    if batch > len(train):
        raise ConfigError(
            f"rl.trainer.train_batch_size={batch} is more than the {len(train)} rows of "
            "data.train_files; lower it"
        )
    validation: list[Row] = []
    if config.data.val_files:
        validation, more = _rows(config, config.data.val_files, tokenizer, "data.val_files")
        dropped += more
    longest = max(len(row.pop("prompt_ids")) for row in [*train, *validation])
    loader = PromptLoader(pd.DataFrame(train), batch, config.seed, config.data.shuffle)
    return Prompts(loader, validation, longest, dropped)


def _rows(
    config: RunConfig, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, key: str
) -> tuple[list[Row], int]:
    if not files:
        raise ConfigError(f"{key} is missing; give one Parquet or JSONL file, or a list of them")
    limit, lenient = config.data.max_prompt_length, config.data.filter_overlong_prompts
    rows: list[Row] = []
    for file in files:
        path = file if "://" in file else str(Path(file).expanduser())
        hard_limit = 0 if lenient else limit
        some = make_rl_data_loader(
            path, tokenizer, _ALL, shuffle=False, max_prompt_length=hard_limit
        ).next_batch()
        if rows and some[0].keys() != rows[0].keys():
            raise DataError(
                f"{path} has other columns than the file before it in {key}: "
                f"{sorted(some[0].keys() ^ rows[0].keys())} are in one only; make them equal"
            )
        rows += some
    kept = [row for row in rows if not (lenient and 0 < limit < len(row["prompt_ids"]))]
    if not kept:
        raise DataError(
            f"{key}: all {len(rows)} prompts are longer than data.max_prompt_length={limit} "
            "tokens; raise it"
        )
    return kept, len(rows) - len(kept)
