"""RL rows of any number as one Parquet file in verl's schema, in bounded memory.

Fields of `extra_info` get one type each, which is known when the last row was seen: rows wait in a
temporary file until then. A field with values of several types becomes text, lists and dictionaries
become JSON.
"""

from __future__ import annotations

import json
import tempfile
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from engine.data.rows import EXTRA, RULE, TRUTH, as_text, is_missing

BATCH_ROWS = 4096  # a row group
_KINDS: dict[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
}


class ParquetWriter:
    """Writes rows that have the contract's columns; the file is there after a clean exit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spool = tempfile.TemporaryFile("w+", encoding="utf-8", dir=path.parent)  # noqa: SIM115
        self._kinds: dict[str, pa.DataType] = {}
        self.rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        with self._spool:
            if kind is None:
                self._write()

    def add(self, row: dict[str, Any]) -> None:
        """Take a row."""
        rule = {name: as_text(value) for name, value in row[RULE].items() if not is_missing(value)}
        extra = {name: _plain(value) for name, value in row[EXTRA].items()}
        for name, value in extra.items():
            if value is not None:
                kind = _kind(value)
                known = self._kinds.setdefault(name, kind)
                if known != kind:
                    self._kinds[name] = _joined(known, kind)
        json.dump({**row, RULE: rule, EXTRA: extra}, self._spool, ensure_ascii=False)
        self._spool.write("\n")
        self.rows += 1

    def _write(self) -> None:
        schema = self._schema()
        partial = self._path.with_suffix(".partial")
        self._spool.seek(0)
        with pq.ParquetWriter(partial, schema) as writer:
            while rows := [self._typed(line) for line in islice(self._spool, BATCH_ROWS)]:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        partial.rename(self._path)

    def _schema(self) -> pa.Schema:
        text = pa.string()
        message = pa.struct({"role": text, "content": text})
        columns = {
            "data_source": text,
            "prompt": pa.list_(message),
            "ability": text,
            RULE: pa.struct({"style": text, TRUTH: text}),
        }
        if self._kinds:
            columns[EXTRA] = pa.struct(self._kinds)
        return pa.schema(columns)

    def _typed(self, line: str) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(line)
        extra = row[EXTRA]
        for name, value in extra.items():
            if value is not None and self._kinds[name] == pa.string():
                extra[name] = as_text(value)
        return row


def _plain(value: object) -> object:
    """A value with a type that Parquet has for all rows: lists and dictionaries as JSON."""
    if is_missing(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 63:
        return str(value)
    return value if type(value) in _KINDS else as_text(value)


def _kind(value: object) -> pa.DataType:
    return _KINDS[type(value)]


def _joined(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    numbers = {pa.int64(), pa.float64()}
    return pa.float64() if {one, other} <= numbers else pa.string()
