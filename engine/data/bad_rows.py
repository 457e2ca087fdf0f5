"""Rows that can't be used: counted by file and number, then refused or left out (`data.bad_rows`).

A row that is bad costs what a good one costs: its error is kept for the first few alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.config import RowsConfig
from engine.data.hub_dataset import HUB, hub_rows
from engine.data.mapping import RowMapper
from engine.data.rows import SHOWN, row_numbers
from engine.errors import DataError, EmptyFileError
from engine.storage.json_rows import Numbered, Row
from engine.storage.readers import stream_rows


@dataclass(slots=True)
class BadRows:
    """The bad rows of one file."""

    name: str  # of the file, e.g. "train.csv"
    policy: str  # data.bad_rows
    total: int = 0  # rows seen, good ones too
    count: int = 0
    numbers: list[int] = field(default_factory=list)  # of the first few
    first: str = ""  # why the first one is bad

    def add(self, number: int, error: DataError) -> None:
        """A bad row of the file."""
        self.count += 1
        self.first = self.first or str(error)
        if len(self.numbers) <= SHOWN:
            self.numbers.append(number)

    def add_empty(self, error: EmptyFileError) -> None:
        """The file has no rows at all."""
        self.count = self.total = 1
        self.first = str(error)

    def check(self) -> None:
        """Raise DataError where bad rows are refused."""
        if not self.count or self.policy == "drop":
            return
        if self.count == 1:
            raise DataError(f"{self.first}; or leave it out with data.bad_rows=drop")
        raise DataError(
            f"{self.first}; {self.count} of {self.total} rows are bad "
            f"({row_numbers(self.numbers)}): correct them, or leave them out with "
            "data.bad_rows=drop"
        )

    def sentence(self) -> str:
        """What was left out and why, for a log; empty where nothing was."""
        if not self.numbers:
            return f"left out: {self.first}" if self.count else ""
        return (
            f"{self.name}: {self.count} of {self.total} rows are bad and left out "
            f"({row_numbers(self.numbers)}); the first: {self.first}"
        )


def _rows_or_none(address: str, bad: BadRows) -> Iterator[Numbered]:
    try:
        yield from address_rows(address)
    except EmptyFileError as error:
        bad.add_empty(error)


def address_rows(address: str) -> Iterator[Numbered]:
    """The rows of a file, an s3:// object or a dataset of the hub (hf://…), by number."""
    return hub_rows(address) if address.startswith(HUB) else stream_rows(address)


def mapped_rows(
    address: str,
    config: RowsConfig,
    bad: BadRows,
    *,
    need_truth: bool = False,
    mapper: Callable[[Row, str], Row] | None = None,
) -> Iterator[tuple[int, Row]]:
    """The canonical rows at an address with their numbers; bad ones go to `bad` instead.

    `mapper` makes them canonical; None: as RL rows. A row without a ground truth is bad with
    `need_truth`. Raises DataError for what is wrong with the whole file (a file without rows counts
    as one bad row with data.bad_rows=drop), StorageError when a store doesn't answer.
    """
    mapper = mapper or RowMapper(config)
    for number, raw in _rows_or_none(address, bad):
        bad.total += 1
        if isinstance(raw, DataError):
            bad.add(number, raw)
            continue
        where = f"{address}, row {number}"
        try:
            row = mapper(raw, where)
            if need_truth and row["reward_model"]["ground_truth"] is None:
                raise DataError(
                    f"{where}: there is no ground truth; name its column in data.columns"
                )
        except DataError as error:
            bad.add(number, error)
            continue
        yield number, row
