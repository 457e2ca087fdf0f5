"""Rows of JSON, CSV and Parquet files, local or remote, with errors that name file and line.

A row that can't be read costs itself alone. What columns mean is for `engine.data.contract` to say.
"""

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
from engine.storage import filesystem, json_rows

BATCH_ROWS = 1024  # of Parquet, held at once

# What reading Parquet raises; ValueError: dates outside Python's years, text that isn't UTF-8.
_UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError)


def csv_rows(file: BinaryIO, name: str, delimiter: str) -> Iterator[json_rows.Numbered]:
    """The rows of a CSV file below its header, from 1: cells as text, or None for an empty one."""
    # Bytes that aren't UTF-8 become lone surrogates, so that their row alone is refused.
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(json_rows.LONGEST_LINE)
    rows = csv.reader(text, delimiter=delimiter)
    try:
        header = next(rows, [])
    except csv.Error as error:
        raise DataError(f"{name}: its header can't be read ({error}); write it again") from None
    if not json_rows.is_utf8("".join(header)):
        raise DataError(f"{name}: its header is not UTF-8; write the file in that encoding")
    if len(set(header)) < len(header) or not all(cell.strip() for cell in header):
        raise DataError(f"{name}: the header {header!r:.200} must name each column once")
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
        elif not json_rows.is_utf8("".join(cells)):
            fault = "not UTF-8; write the file in that encoding"
        if fault:
            yield number, DataError(f"{name}, row {number}: {fault}")
        else:
            yield number, {name: cell or None for name, cell in zip(header, cells, strict=True)}


def parquet_rows(file: BinaryIO, name: str) -> Iterator[json_rows.Numbered]:
    """The rows of a Parquet file. Where a batch has a cell that Python can't hold, row by row."""
    try:
        parquet = pq.ParquetFile(file)
        names = parquet.schema_arrow.names
        if repeated := sorted({column for column in names if names.count(column) > 1}):
            raise DataError(f"{name} has several columns {repeated[0]!r}; rename or remove them")
        before = 0
        for batch in parquet.iter_batches(BATCH_ROWS):
            try:
                yield from enumerate(batch.to_pylist(), start=before + 1)
            except _UNREADABLE:
                for at in range(len(batch)):
                    yield before + at + 1, _row_of(batch, at, f"{name}, row {before + at + 1}")
            before += len(batch)
    except _UNREADABLE as error:
        reason = f"not a readable Parquet file ({filesystem.error_text(error)})"
        raise DataError(f"{name} is {reason}; write it again") from None


def _row_of(batch: pa.RecordBatch, at: int, where: str) -> json_rows.Row | DataError:
    try:
        return batch.slice(at, 1).to_pylist()[0]
    except _UNREADABLE as error:
        return DataError(f"{where}: can't be read ({filesystem.error_text(error)}); write it again")


SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
PACKED = ".gz"  # after a suffix of text
_CHOICES = f"a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file"


def parse_rows(data: bytes, name: str) -> Iterator[json_rows.Numbered]:
    """Yield the rows in the bytes of the file called `name`; see `stream_rows`."""
    return _stream(io.BytesIO(data), name)


def stream_rows(uri: str | Path) -> Iterator[json_rows.Numbered]:
    """Yield a file's rows with their numbers, and for a row that can't be read its DataError.

    Memory is bounded by a batch, but for a JSON array. Raises as `open_file`, and for no rows.
    """
    file_format(str(uri))
    with open_file(uri) as file:
        yield from _stream(file, str(uri))


def file_format(name: str) -> str:
    """The suffix that says how to read a file, e.g. ".csv" of "a.CSV.gz"; DataError for others."""
    path = PurePosixPath(name.lower())
    suffix = PurePosixPath(path.stem).suffix if path.suffix == PACKED else path.suffix
    if suffix not in SUFFIXES or (path.suffix == PACKED and suffix == ".parquet"):
        raise DataError(f"{name}: can't read {path.suffix or 'such a file'}; give {_CHOICES}")
    return suffix


def is_data_file(name: str) -> bool:
    try:
        return not name.rpartition("/")[2].startswith((".", "_")) and bool(file_format(name))
    except DataError:
        return False


def read_bytes(uri: str | Path) -> bytes:
    """Return a file's content; raises as `open_file`."""
    with open_file(uri) as file:
        return file.read()


@contextmanager
def open_file(uri: str | Path) -> Iterator[IO[bytes]]:
    """Open a file, of a store a copy; DataError where there is none, StorageError for no answer."""
    no_file = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    try:
        with filesystem.translated(uri, DataError, keep=no_file):
            if filesystem.is_remote(uri):
                file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
                file.writelines(filesystem.Files(uri, filesystem.PATIENT).chunks())
                file.seek(0)
            else:
                file = filesystem.as_path(uri).open("rb")
    except IsADirectoryError:
        raise DataError(f"{uri} is a folder; give the path of {_CHOICES}") from None
    except no_file:
        raise DataError(f"{uri} does not exist; check the path") from None
    with file:
        yield file


def list_files(folder: str | Path) -> dict[str, int]:
    """Return the files right in a folder, URI → size in bytes; empty where it doesn't exist."""
    with filesystem.translated(folder, DataError):
        files = filesystem.Files(folder)
        # Not `== "file"`: the hub's cache keeps its files as links.
        entries = [entry for entry in files.entries() if entry["type"] != "directory"]
    return {files.uri_of(entry["name"]): int(entry["size"] or 0) for entry in entries}


def _stream(file: IO[bytes], name: str) -> Iterator[json_rows.Numbered]:
    suffix = file_format(name)
    packed = name.lower().endswith(PACKED)
    opened = cast(BinaryIO, gzip.GzipFile(fileobj=file) if packed else file)
    if suffix in (".csv", ".tsv"):
        rows = csv_rows(opened, name, "\t" if suffix == ".tsv" else ",")
    else:
        readers = {".parquet": parquet_rows, ".json": json_rows.json_array}
        rows = readers.get(suffix, json_rows.json_lines)(opened, name)
    empty = True
    try:
        for numbered in rows:
            empty = False
            yield numbered
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{name} is not a readable gzip file ({error}); write it again") from None
    if empty:
        raise EmptyFileError(f"{name} has no rows; give a file with at least one")
