"""What a folder of checkpoints is being made from: `origin.json`, before there is an artifact.

A stage that is cut off leaves checkpoints and no manifest; this file says whose they are.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from engine.errors import LineageError, StorageError
from engine.storage.code_version import code_version, sources_digest
from engine.storage.fsync import fsync
from engine.storage.hashing import as_path, file_system, is_remote, read_bytes
from engine.storage.manifest import Draft
from engine.storage.s3 import passes

ORIGIN = "origin.json"


class Origin(Draft):
    """All of `origin.json`."""

    code_version: str
    sources_digest: str
    created_at: datetime


def write_origin(folder: str | Path, draft: Draft) -> Origin:
    """Write `origin.json` into a local or remote folder of checkpoints, which is made if need be.

    Raises LineageError when it can't be written, StorageError when a store doesn't answer.
    """
    origin = Origin(
        **dict(draft),
        code_version=code_version(),
        sources_digest=sources_digest(),
        created_at=datetime.now(UTC).replace(microsecond=0),
    )
    data = (origin.model_dump_json(indent=2) + "\n").encode()
    try:
        if is_remote(folder):
            filesystem, path = file_system(str(folder))
            filesystem.pipe_file(f"{path}/{ORIGIN}", data)
        else:
            _write_local(as_path(folder) / ORIGIN, data)
    except (LineageError, StorageError):
        raise
    except Exception as error:  # fsspec's drivers raise errors of many libraries
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        away = is_remote(folder) and passes(error)
        raise (StorageError if away else LineageError)(
            f"can't write {folder}/{ORIGIN}: {words}; check the disk or the address"
        ) from error
    return origin


def _write_local(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{ORIGIN}.{os.getpid()}")
    draft.write_bytes(data)
    fsync(draft)
    os.replace(draft, target)


def read_origin(folder: str) -> Origin | None:
    """Read the origin of a folder of checkpoints; None where none was written."""
    where = f"{folder.rstrip('/')}/{ORIGIN}"
    try:
        return Origin.model_validate_json(read_bytes(where))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise LineageError(f"{where} is not readable: {error.errors()[0]['msg']}") from None
