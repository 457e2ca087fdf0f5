"""Rows of CSV and Parquet files, a batch at a time; a row that can't be read costs itself alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import DataError
from engine.storage.json_rows import LONGEST_LINE, Numbered, Row

BATCH_ROWS = 1024  # of Parquet, held at once

# What reading Parquet raises; ValueError: dates outside Python's years, text that isn't UTF-8.
_UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError)


def csv_rows(file: BinaryIO, name: str, delimiter: str) -> Iterator[Numbered]:
    """The rows of a CSV file with a header, all cells as text. Rows are numbered below the header.

    Text that isn't UTF-8 and rows with more or fewer cells than the header are refused by number.
    """
    # Bytes that aren't UTF-8 become lone surrogates, so that their row alone is refused.
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(LONGEST_LINE)
    rows = csv.reader(text, delimiter=delimiter)
    try:
        header = next(rows, [])
    except csv.Error as error:
        raise DataError(f"{name}: its header can't be read ({error}); write it again") from None
    if not _is_utf8("".join(header)):
        raise DataError(f"{name}: its header is not UTF-8; write the file in that encoding")
    if len(set(header)) < len(header) or not all(cell.strip() for cell in header):
        raise DataError(
            f"{name}: the header {header!r:.200} must name each column once; write one as the "
            "first line"
        )
    number = 0
    while True:
        number += 1
        where = f"{name}, row {number}"
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield number, DataError(f"{where}: not valid CSV ({error}); correct its quotes")
            continue
        if not cells:
            continue
        if len(cells) != len(header):
            shape = f"{len(cells)} cells below a header of {len(header)}"
            yield (
                number,
                DataError(f"{where}: {shape}; correct its quotes and commas"),
            )
        elif not _is_utf8("".join(cells)):
            yield number, DataError(f"{where}: not UTF-8; write the file in that encoding")
        else:
            yield number, dict(zip(header, cells, strict=True))


def parquet_rows(file: BinaryIO, name: str) -> Iterator[Numbered]:
    """The rows of a Parquet file. Where a batch has a cell that Python can't hold, row by row."""
    try:
        parquet = pq.ParquetFile(file)
        names = parquet.schema_arrow.names
        if repeated := sorted({column for column in names if names.count(column) > 1}):
            raise DataError(f"{name} has several columns {repeated[0]!r}; rename or remove them")
        number = 0
        for batch in parquet.iter_batches(BATCH_ROWS):
            yield from _rows_of(batch, number, name)
            number += len(batch)
    except _UNREADABLE as error:
        raise DataError(
            f"{name} is not a readable Parquet file ({_first_line(error)}); write it again"
        ) from None


def _rows_of(batch: pa.RecordBatch, before: int, name: str) -> Iterator[Numbered]:
    try:
        yield from enumerate(batch.to_pylist(), start=before + 1)
    except _UNREADABLE:
        for at in range(len(batch)):
            number = before + at + 1
            where = f"{name}, row {number}"
            try:
                row: Row = batch.slice(at, 1).to_pylist()[0]
                yield number, row
            except _UNREADABLE as error:
                yield (
                    number,
                    DataError(f"{where}: can't be read ({_first_line(error)}); write it again"),
                )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
