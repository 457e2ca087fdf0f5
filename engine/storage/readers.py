"""Reading JSONL and Parquet files, local or remote, with errors that name file and line.

What the columns mean is for the data sources and `engine.data.contract` to say.
"""

from __future__ import annotations

import io
import json
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import DataError
from engine.storage.filesystem import Files, as_path, is_remote, read_file, translated

SUFFIXES = (".jsonl", ".parquet")


def read_rows(uri: str | Path) -> list[dict[str, Any]]:
    """Read all rows of a `.jsonl` or `.parquet` file at a local path or URL (`s3://…`).

    Raises DataError when the file is missing, malformed (naming the line) or has no rows, and
    StorageError when the store doesn't answer.
    """
    return parse_rows(read_bytes(uri), str(uri))


def parse_rows(data: bytes, name: str) -> list[dict[str, Any]]:
    """Parse the bytes of the file called `name`; see `read_rows`."""
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"{name}: can't read {suffix or 'a file without suffix'}; give {_choices()}"
        )
    rows = _parse_jsonl(data, name) if suffix == ".jsonl" else _parse_parquet(data, name)
    if not rows:
        raise DataError(f"{name} has no rows; give a file with at least one")
    return rows


def read_bytes(uri: str | Path) -> bytes:
    """Return a file's content.

    Raises DataError when it is missing or refused, StorageError when the store doesn't answer.
    """
    if not is_remote(uri) and as_path(uri).is_dir():
        raise DataError(f"{uri} is a folder; give the path of {_choices()}")
    try:
        return read_file(uri, DataError)
    except FileNotFoundError:
        raise DataError(f"{uri} does not exist; check the path") from None


def list_files(folder: str | Path) -> dict[str, int]:
    """Return the files right in a folder, URI → size in bytes; empty where it doesn't exist."""
    with translated(folder, DataError):
        files = Files(folder)
        # Not `== "file"`: the hub's cache keeps its files as links.
        entries = [entry for entry in files.entries() if entry["type"] != "directory"]
    return {files.uri_of(entry["name"]): int(entry["size"] or 0) for entry in entries}


def _parse_jsonl(data: bytes, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(
                f"{name}, line {number}: not valid JSON ({error}); each line must be one object"
            ) from None
        if not isinstance(row, dict):
            raise DataError(
                f"{name}, line {number}: a JSON {type(row).__name__}, not an object with columns"
            )
        rows.append(row)
    return rows


def _parse_parquet(data: bytes, name: str) -> list[dict[str, Any]]:
    try:
        return pq.read_table(io.BytesIO(data)).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{name} is not a readable Parquet file ({error}); write it again"
        ) from None


def _choices() -> str:
    return " or ".join(f"a {suffix} file" for suffix in SUFFIXES)
