"""How many rows of a table were added and removed between two versions of its file."""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from engine.errors import LineageError
from engine.storage.filesystem import read_file

LARGEST = 256 << 20  # bytes of a file that is read for this


@dataclass(frozen=True, slots=True)
class RowChange:
    """A table before and after, its rows taken as a multiset."""

    name: str  # file below the folder, e.g. "train.parquet"
    before: int  # rows
    after: int
    added: int
    removed: int
    columns: str = ""  # "+new, -old" where the columns differ


def row_change(name: str, before: str, after: str) -> RowChange | None:
    """Compare one Parquet or JSON Lines file of two folders; None for other or unreadable ones."""
    if not name.endswith((".parquet", ".jsonl")):
        return None
    sides = []
    for folder in (before, after):
        try:
            data = read_file(f"{folder}/{name}", LineageError)
        except (FileNotFoundError, LineageError):
            return None
        if len(data) > LARGEST:
            return None
        try:
            sides.append(_read_table(name, data))
        except (OSError, ValueError):  # pyarrow's errors are of these
            return None
    (columns_before, one), (columns_after, two) = sides
    signs = [f"+{c}" for c in columns_after if c not in columns_before]
    signs += [f"-{c}" for c in columns_before if c not in columns_after]
    return RowChange(
        name,
        before=one.total(),
        after=two.total(),
        added=(two - one).total(),
        removed=(one - two).total(),
        columns=", ".join(signs),
    )


def _read_table(name: str, data: bytes) -> tuple[list[str], Counter[str]]:
    """Return the columns, and how often each row occurs, by its digest."""
    if name.endswith(".jsonl"):
        rows = [json.loads(line) for line in data.splitlines() if line.strip()]
        columns = {c: None for row in rows if isinstance(row, dict) for c in row}
        return list(columns), Counter(map(_digest, rows))
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(io.BytesIO(data))
    return list(table.schema_arrow.names), Counter(_parquet_rows(table))


def _parquet_rows(table: object) -> Iterator[str]:
    for batch in table.iter_batches(batch_size=1024):  # type: ignore[attr-defined]
        for row in batch.to_pylist():
            yield _digest(row)


def _digest(row: object) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()
