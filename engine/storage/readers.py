"""Reading JSONL and Parquet files, local or remote, with errors that name file and line.

What the columns mean is for the data sources and `engine.data.contract` to say.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import DataError
from engine.storage.filesystem import Files, as_path, is_remote, read_file, translated

SUFFIXES = (".jsonl", ".parquet")
DEEPEST = 64  # lists and objects in each other; JSON, Parquet and pickle take several times that

_TOO_DEEP = f"has lists or objects nested more than {DEEPEST} levels deep; flatten them"
_MAYBE_LONE = re.compile(r"\\u[dD][89a-fA-F]")  # the escape of a surrogate, in a pair or alone


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
    lines = enumerate(data.split(b"\n"), start=1)
    return [_parse_line(line, f"{name}, line {n}") for n, line in lines if line.strip()]


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    """Parse one object whose values can be written again: as UTF-8, as JSON, and to Parquet."""
    try:
        text = line.decode("utf-8-sig")
        row = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{where}: not valid JSON ({error}); each line must be one object"
        ) from None
    except RecursionError:
        raise DataError(f"{where}: {_TOO_DEEP}") from None
    except ValueError:
        column = _column_with_long_number(text)
        raise DataError(
            f"{where}: column {column!r} has a whole number of more than "
            f"{sys.get_int_max_str_digits()} digits; write it as text"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON {type(row).__name__}, not an object with columns")
    if line.count(b"[") + line.count(b"{") > DEEPEST:
        for column, value in row.items():
            if _is_too_deep(value):
                raise DataError(f"{where}: column {column!r} {_TOO_DEEP}")
    if _MAYBE_LONE.search(text):
        for column, value in row.items():
            if _has_lone_surrogate({column: value}):
                raise DataError(
                    f"{where}: column {column!r} has half of a UTF-16 surrogate pair, such as "
                    '"\\ud83d", which is no character; write the pair, or leave it out'
                )
    return row


def _is_too_deep(value: Any) -> bool:
    """Whether lists and objects lie in each other more than `DEEPEST` levels; doesn't recurse."""
    level = [value]
    for _ in range(DEEPEST):
        level = [v for v in level if isinstance(v, list | dict)]
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return False
    return any(isinstance(v, list | dict) for v in level)


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _column_with_long_number(text: str) -> str:
    """The column of a JSON object that holds a number too long for Python."""
    limit, mark = sys.get_int_max_str_digits(), "\ud800"  # which no digits contain
    row = json.loads(text, parse_int=lambda digits: mark if len(digits) > limit else digits)
    columns = row.items() if isinstance(row, dict) else []
    return next((column for column, value in columns if _has_lone_surrogate(value)), "")


def _parse_parquet(data: bytes, name: str) -> list[dict[str, Any]]:
    try:
        return pq.read_table(io.BytesIO(data)).to_pylist()
    # ValueError: dates outside Python's years and text that isn't UTF-8, found as values are made.
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{name} is not a readable Parquet file ({reason}); write it again"
        ) from None


def _choices() -> str:
    return " or ".join(f"a {suffix} file" for suffix in SUFFIXES)
