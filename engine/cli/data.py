"""The rows of a run's data files, checked before any worker starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.cli.settings import RunConfig
from engine.data.control_tokens import rows_spelling_control_tokens
from engine.data.loader import PromptLoader, add_prompt_ids, frame_of
from engine.data.rl_rows import Row, read_rl_rows
from engine.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts for training and validation."""

    loader: PromptLoader
    validation: list[Row]
    longest: int  # prompt of both, in tokens
    left_out: int  # rows that were longer than data.max_prompt_length
    control_tokens: int  # rows that spell control tokens, left out or not


def read_prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> Prompts:
    """Read all files; raise DataError or ConfigError for rows and settings that don't fit.

    `context` is the model's limit in tokens.
    """
    train_files, val_files = config.data.train_files, config.data.val_files
    train, dropped, spelled = _rows(config, train_files, tokenizer, context, "data.train_files")
    batch = config.rl.trainer.train_batch_size
    if batch > len(train):
        raise ConfigError(
            f"rl.trainer.train_batch_size={batch} is more than the {len(train)} rows of "
            "data.train_files; lower it"
        )
    validation: list[Row] = []
    if val_files:
        validation, *more = _rows(config, val_files, tokenizer, context, "data.val_files")
        dropped, spelled = dropped + more[0], spelled + more[1]
    longest = max(len(row.pop("prompt_ids")) for row in [*train, *validation])
    loader = PromptLoader(frame_of(train), batch, config.seed, config.data.shuffle)
    return Prompts(loader, validation, longest, dropped, spelled)


def _rows(
    config: RunConfig,
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    key: str,
) -> tuple[list[Row], int, int]:
    """The rows of all files, how many were too long, and how many spell control tokens."""
    if not files:
        raise ConfigError(f"{key} is missing; give one Parquet or JSONL file, or a list of them")
    limit, way_out = config.data.max_prompt_length, "raise data.max_prompt_length"
    if limit and config.data.filter_overlong_prompts:
        way_out = ""
    if not limit:
        limit = context
        way_out = "leave them out with data.max_prompt_length and data.filter_overlong_prompts"
    policy = config.data.control_tokens
    rows: list[Row] = []
    spelled = 0
    for file in files:
        path = file if "://" in file else str(Path(file).expanduser())
        some = read_rl_rows(path)
        _check_alike(rows or some, some, path, key)
        found = set(rows_spelling_control_tokens(some, tokenizer, policy, path, first_row=1))
        spelled += len(found)
        kept = [i for i in range(len(some)) if policy != "drop" or i not in found]
        some, numbers = [some[i] for i in kept], [i + 1 for i in kept]
        add_prompt_ids(some, tokenizer, limit, path, way_out, numbers)
        rows += some
    if not rows:
        raise DataError(
            f"{key}: all {spelled} rows spell control tokens of the model, and "
            "data.control_tokens=drop leaves them out; correct them, or set it to escape"
        )
    short = [row for row in rows if row["prompt_ids"] is not None]
    if not short:
        raise DataError(
            f"{key}: all {len(rows)} prompts are longer than data.max_prompt_length={limit} "
            "tokens; raise it"
        )
    return short, len(rows) - len(short), spelled


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
