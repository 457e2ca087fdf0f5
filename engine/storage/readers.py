"""Reading JSONL and Parquet files, local or remote, with errors that name file and line.

What the columns mean is the business of sources and of `tasks.schemas`.
"""

from __future__ import annotations

import io
import json
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import DataError, StorageError
from engine.storage.s3 import from_environment, passes

SUFFIXES = (".jsonl", ".parquet")

# Both botocore and s3fs retry by default, so a store that never answers would take many minutes.
_S3_TIMEOUTS: dict[str, Any] = {
    "config_kwargs": {"connect_timeout": 5, "read_timeout": 10, "retries": {"max_attempts": 0}}
}
_S3_TRIES = 2


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
    try:
        with open_filesystem(uri).open(str(uri), "rb") as file:
            return bytes(file.read())
    except FileNotFoundError:
        raise DataError(f"{uri} does not exist; check the path") from None
    except IsADirectoryError:
        raise DataError(f"{uri} is a folder; give the path of {_choices()}") from None
    except DataError:
        raise
    except Exception as error:
        raise unreachable(uri, error) from error


def list_files(folder: str | Path) -> dict[str, int]:
    """Return the files right in a folder, URI → size in bytes; empty where it doesn't exist."""
    filesystem = open_filesystem(folder)
    try:
        filesystem.invalidate_cache()
        entries = filesystem.ls(str(folder), detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except Exception as error:
        raise unreachable(folder, error) from error
    # Not `== "file"`: the hub's cache keeps its files as links.
    files = [entry for entry in entries if entry["type"] != "directory"]
    local = "file" in filesystem.protocol
    names = [f["name"] if local else filesystem.unstrip_protocol(f["name"]) for f in files]
    return {name: int(file["size"] or 0) for name, file in zip(names, files, strict=True)}


def open_filesystem(uri: str | Path) -> fsspec.AbstractFileSystem:
    """Return the file system of a path or URL; S3's endpoint and keys come from the environment."""
    protocol = str(uri).partition("://")[0] if "://" in str(uri) else "file"
    is_s3 = protocol in ("s3", "s3a")
    try:
        settings = _S3_TIMEOUTS | from_environment("s3://") if is_s3 else {}
        filesystem = fsspec.filesystem(protocol, **settings)
        if is_s3:
            filesystem.retries = _S3_TRIES
        return filesystem
    except (ValueError, ImportError) as error:
        raise DataError(f"{uri}: can't read {protocol}:// ({error}); use a path or s3://") from None


def unreachable(uri: str | Path, error: Exception) -> DataError | StorageError:
    """Return the error for a store that refuses, or for one that doesn't answer: StorageError.

    The second may answer another try, so on a cluster the task is run again.
    """
    away = "://" in str(uri) and passes(error)
    return (StorageError if away else DataError)(
        f"{uri} can't be read ({type(error).__name__}: {error}); check the address, the "
        "credentials (for S3: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and "
        "the network"
    )


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
