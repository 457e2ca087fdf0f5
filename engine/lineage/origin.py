"""What a folder of checkpoints is being made from: `origin.json`, before there is an artifact.

A stage that is cut off leaves checkpoints and no manifest; this file says whose they are.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from engine.disk import fsync
from engine.errors import LineageError
from engine.lineage.code import code_version, sources_digest
from engine.lineage.hashing import read_bytes
from engine.lineage.manifest import Draft

ORIGIN = "origin.json"


class Origin(Draft):
    """All of `origin.json`."""

    code_version: str
    sources_digest: str
    created_at: datetime


def write_origin(folder: str | Path, draft: Draft) -> Origin:
    """Write `origin.json` into a local folder of checkpoints, which is made if need be."""
    origin = Origin(
        **dict(draft),
        code_version=code_version(),
        sources_digest=sources_digest(),
        created_at=datetime.now(UTC).replace(microsecond=0),
    )
    target = Path(folder) / ORIGIN
    target.parent.mkdir(parents=True, exist_ok=True)
    draft_file = target.with_name(f".{ORIGIN}.{os.getpid()}")
    draft_file.write_text(origin.model_dump_json(indent=2) + "\n")
    fsync(draft_file)
    os.replace(draft_file, target)
    return origin


def read_origin(folder: str) -> Origin | None:
    """Read the origin of a folder of checkpoints; None where none was written."""
    where = f"{folder.rstrip('/')}/{ORIGIN}"
    try:
        return Origin.model_validate_json(read_bytes(where))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise LineageError(f"{where} is not readable: {error.errors()[0]['msg']}") from None
