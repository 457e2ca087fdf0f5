"""Prompts in batches, epoch after epoch, resumable to the row.

Reads no files but in `make_rl_data_loader`; tokens come into it only there, on request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from engine.config import RowsConfig, SamplingConfig
from engine.data.cells import plain, row_numbers
from engine.data.order import make_order
from engine.data.row_files import read_file_rows
from engine.data.rows import Truncation
from engine.data.templates import encode_short_prompts
from engine.errors import ConfigError, DataError
from engine.storage.json_rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_LIVE = ("pass_rate", "pass_rate_recheck")  # settings of `data.sampling`


class PromptLoader:
    """Endless batches of rows; every row comes once an epoch, in an order drawn from the seed.

    A batch that an epoch's end cuts is filled from the next epoch, so all batches have
    `batch_size` rows; only a frame with fewer rows than that gives its whole self each time.

    >>> loader = PromptLoader(pd.DataFrame({"prompt": ["a", "b", "c"]}), batch_size=2, seed=0)
    >>> len(loader.next_batch()), loader.state_dict()["position"]
    (2, 2)
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        sampling: SamplingConfig | None = None,
        template_variables: Mapping[str, object] | None = None,
        truncation: Truncation | None = None,
        files: Sequence[str] = (),
    ) -> None:
        """Raise ConfigError for weights that are not the sources', DataError without rows.

        `template_variables` are of the chat template, `truncation` cuts long prompts, and `files`
        are those that the state names: they may change.
        """
        if len(frame) == 0:
            raise DataError("a prompt loader got no rows; give a frame with at least one")
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be at least 1")
        records = frame.to_dict("records")
        self._rows = [{str(column): value for column, value in row.items()} for row in records]
        self.batch_size = min(batch_size, len(self._rows))
        self.template_variables = dict(template_variables or {})
        self.truncation, self._files = truncation, list(files)
        self._settings: dict[str, object] = {"seed": seed, "shuffle": shuffle}
        if truncation is not None:
            self._settings["truncation"] = asdict(truncation)
        sampling = sampling or SamplingConfig()
        if sampling.weights or sampling.curriculum:
            self._settings |= sampling.model_dump(include={"weights", "curriculum"})
        if sampling.pass_rate is not None:
            self._settings |= sampling.model_dump(mode="json", include=set(_LIVE))
        prompts = _as_json([row.get("prompt") for row in self._rows])
        self._digest = hashlib.sha256(prompts.encode()).hexdigest()
        self._order = make_order(self._rows, seed, shuffle, sampling, self.batch_size)
        self.wants_rates = sampling.pass_rate is not None
        self._rows_of: dict[int, list[int]] = {}  # by their prompt's hash
        for row, values in enumerate(self._rows if self.wants_rates else ()):
            self._rows_of.setdefault(hash(_as_json(values.get("prompt"))), []).append(row)

    def __len__(self) -> int:
        """Rows an epoch."""
        return len(self._rows)

    def rows(self) -> list[Row]:
        return [dict(row) for row in self._rows]

    @property
    def epoch(self) -> int:
        """The epoch that the next row comes from, from 0; of several sources the least."""
        return self._order.epoch

    def next_batch(self) -> list[Row]:
        """The next `batch_size` rows; DataError where too few may be used again."""
        return [dict(self._rows[self._order.next()]) for _ in range(self.batch_size)]

    def observe(self, prompt: object, rate: float) -> None:
        """Note the share of right completions that a prompt has had (`sampling.pass_rate`)."""
        for row in self._rows_of.get(hash(_as_json(prompt)), ()):
            self._order.observe(row, rate)

    def state_dict(self) -> dict[str, object]:
        """Return where the loader is, as plain values, fit for JSON."""
        data = {"rows": len(self._rows), "digest": self._digest, "train_files": self._files}
        return self._order.state_dict() | self._settings | data

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on after the saved loader's last row, in any batch size; DataError for other data."""
        present = self.state_dict()
        fixed = ("rows", "digest", "seed", "shuffle", "weights", "curriculum", "truncation")
        for key in (*fixed, *_LIVE):
            if state.get(key) != present.get(key):
                raise DataError(
                    f"the saved loader state is of other data: {key} is {state.get(key)!r} there "
                    f"and {present.get(key)!r} here; resume with the same data, seed and order, "
                    "or give another checkpoint folder (trainer.experiment_name=NAME)"
                )
        self._order.load_state_dict(state)


def make_rl_data_loader(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 64,
    seed: int = 0,
    shuffle: bool = True,
    max_prompt_length: int = 0,
) -> PromptLoader:
    """Read RL rows in canonical form from a JSONL, JSON, CSV or Parquet file; return their loader.

    With a tokenizer, rows also get `prompt_ids` (list[int]), and a prompt above `max_prompt_length`
    tokens (0: no limit) is refused. Raises DataError that names the file and the first wrong rows.
    """
    rows = read_file_rows(str(path), RowsConfig()).rows
    if tokenizer is not None:
        add_prompt_ids(rows, tokenizer, max_prompt_length, str(path))
    return PromptLoader(frame_of(rows), batch_size, seed, shuffle)


def add_prompt_ids(
    rows: list[Row],
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    path: str,
    way_out: str = "raise max_prompt_length",
    numbers: Sequence[int] = (),
    truncation: Truncation | None = None,
) -> None:
    """Give each row `prompt_ids`; refuse prompts of more than `limit` tokens (0: no limit).

    With an empty `way_out` their `prompt_ids` are None instead, with `truncation` they are cut.
    `numbers` are those of the rows in the file; none: 1, 2, ….
    """
    numbers = numbers or range(1, len(rows) + 1)
    prompts = [row["prompt"] for row in rows]
    most = 0 if truncation else limit
    ids = encode_short_prompts(tokenizer, prompts, most or 1 << 40, path, numbers)
    if truncation is not None:
        ids = [truncation.cut(tokens or []) for tokens in ids]
    long = [i for i, tokens in zip(numbers, ids, strict=True) if tokens is None]
    if long and way_out:
        raise DataError(
            f"{path}: {len(long)} prompts are longer than {limit} tokens ({row_numbers(long)}); "
            f"shorten or remove them, or {way_out}"
        )
    for row, tokens in zip(rows, ids, strict=True):
        row["prompt_ids"] = tokens


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """A table whose cells are the rows' values as they are: no number becomes another type."""
    return pd.DataFrame(rows, dtype=object)


def _as_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=plain)
