"""What a folder of checkpoints is being made from: `origin.json`, before there is an artifact.

A stage that is cut off leaves checkpoints and no manifest; this file says whose they are.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from engine.errors import LineageError
from engine.storage.code_version import code_version, sources_digest
from engine.storage.filesystem import Files, read_file, translated
from engine.storage.manifest import Draft

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
        **dict(draft.redacted()),
        code_version=code_version(),
        sources_digest=sources_digest(),
        created_at=datetime.now(UTC).replace(microsecond=0),
    )
    data = (origin.model_dump_json(indent=2) + "\n").encode()
    with translated(f"{folder}/{ORIGIN}", LineageError, "write"):
        Files(folder).write(ORIGIN, data)
    return origin


def read_origin(folder: str) -> Origin | None:
    """Read the origin of a folder of checkpoints; None where none was written."""
    where = f"{folder.rstrip('/')}/{ORIGIN}"
    try:
        return Origin.model_validate_json(read_file(where, LineageError))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise LineageError(f"{where} is not readable: {error.errors()[0]['msg']}") from None
