"""Rows of JSON, CSV and Parquet files, local or remote, with errors that name file and line.

A row that can't be read costs itself alone. JSON text is parsed in `json_rows`. What the columns
mean is for the data sources and `engine.data.contract` to say.
"""

from __future__ import annotations

import csv
import gzip
import io
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import DataError, EmptyFileError
from engine.storage.filesystem import (
    PATIENT,
    Files,
    as_path,
    error_text,
    is_remote,
    read_file,
    translated,
)
from engine.storage.json_rows import (
    LONGEST_LINE,
    Numbered,
    Row,
    is_utf8,
    json_array,
    json_lines,
)

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
    if not is_utf8("".join(header)):
        raise DataError(f"{name}: its header is not UTF-8; write the file in that encoding")
    if len(set(header)) < len(header) or not all(cell.strip() for cell in header):
        raise DataError(
            f"{name}: the header {header!r:.200} must name each column once; write one as the "
            "first line"
        )
    for number in count(1):
        fault = ""
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            cells, fault = header, f"not valid CSV ({error}); correct its quotes"
        if not cells:
            continue
        if len(cells) != len(header):
            shape = f"{len(cells)} cells below a header of {len(header)}"
            fault = f"{shape}; correct its quotes and commas"
        elif not is_utf8("".join(cells)):
            fault = "not UTF-8; write the file in that encoding"
        if fault:
            yield number, DataError(f"{name}, row {number}: {fault}")
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
            try:
                row: Row | DataError = batch.slice(at, 1).to_pylist()[0]
            except _UNREADABLE as error:
                reason = _first_line(error)
                row = DataError(f"{name}, row {number}: can't be read ({reason}); write it again")
            yield number, row


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
PACKED = ".gz"  # after a suffix of text


def parse_rows(data: bytes, name: str) -> list[Row]:
    """Parse the bytes of the file called `name`, of a format in `SUFFIXES`.

    Raises DataError when the file is malformed (naming the line) or has no rows.
    """
    rows: list[Row] = []
    for _, row in _stream(io.BytesIO(data), name):
        if isinstance(row, DataError):
            raise row
        rows.append(row)
    return rows


def stream_rows(uri: str | Path) -> Iterator[Numbered]:
    """Yield a file's rows with their numbers, and for a row that can't be read its DataError.

    Memory is bounded by a batch, but for a JSON array. Raises DataError when the file is missing,
    has no rows or can't be read at all, and StorageError when the store doesn't answer.
    """
    file_format(str(uri))
    with open_file(uri) as file:
        yield from _stream(file, str(uri))


def file_format(name: str) -> str:
    """The suffix that says how to read a file, e.g. ".csv" of "a.CSV.gz"; DataError for others."""
    path = PurePosixPath(name.lower())
    suffix = PurePosixPath(path.stem).suffix if path.suffix == PACKED else path.suffix
    if suffix not in SUFFIXES or (path.suffix == PACKED and suffix == ".parquet"):
        raise DataError(
            f"{name}: can't read {path.suffix or 'a file without suffix'}; give {_choices()}"
        )
    return suffix


def is_data_file(name: str) -> bool:
    """Whether a file's name says that it holds rows."""
    try:
        return not name.rpartition("/")[2].startswith((".", "_")) and bool(file_format(name))
    except DataError:
        return False


def read_bytes(uri: str | Path) -> bytes:
    """Return a file's content.

    Raises DataError when it is missing or refused, StorageError when the store doesn't answer.
    """
    if not is_remote(uri) and as_path(uri).is_dir():
        raise DataError(f"{uri} is a folder; give the path of {_choices()}")
    try:
        return read_file(uri, DataError)
    except FileNotFoundError:
        raise _missing(uri) from None


@contextmanager
def open_file(uri: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for reading; of one in a store, a copy on this disk. Raises as `read_bytes`."""
    if is_remote(uri):
        with tempfile.TemporaryFile() as copy:
            try:
                with translated(uri, DataError, keep=(FileNotFoundError,)):
                    copy.writelines(Files(uri, PATIENT).chunks())
            except FileNotFoundError:
                raise _missing(uri) from None
            copy.seek(0)
            yield copy
        return
    path = as_path(uri)
    if path.is_dir():
        raise DataError(f"{uri} is a folder; give the path of {_choices()}")
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(uri) from None
    except OSError as error:
        raise DataError(f"can't read {uri}: {error_text(error)}; check the address") from None
    with file:
        yield file


def list_files(folder: str | Path) -> dict[str, int]:
    """Return the files right in a folder, URI → size in bytes; empty where it doesn't exist."""
    with translated(folder, DataError):
        files = Files(folder)
        # Not `== "file"`: the hub's cache keeps its files as links.
        entries = [entry for entry in files.entries() if entry["type"] != "directory"]
    return {files.uri_of(entry["name"]): int(entry["size"] or 0) for entry in entries}


def _stream(file: IO[bytes], name: str) -> Iterator[Numbered]:
    suffix = file_format(name)
    packed = name.lower().endswith(PACKED)
    opened = cast(BinaryIO, gzip.GzipFile(fileobj=file) if packed else file)
    if suffix in (".csv", ".tsv"):
        rows = csv_rows(opened, name, "\t" if suffix == ".tsv" else ",")
    else:
        rows = {".parquet": parquet_rows, ".json": json_array}.get(suffix, json_lines)(opened, name)
    empty = True
    try:
        for numbered in rows:
            empty = False
            yield numbered
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{name} is not a readable gzip file ({error}); write it again") from None
    if empty:
        raise EmptyFileError(f"{name} has no rows; give a file with at least one")


def _missing(uri: str | Path) -> DataError:
    return DataError(f"{uri} does not exist; check the path")


def _choices() -> str:
    return f"a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file"
