"""Failures as one sentence on the terminal, with the tracebacks in a file."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from engine.errors import (
    ConfigError,
    DataError,
    EngineError,
    ModelError,
    PlacementError,
    PreemptedError,
)
from engine.redaction import presentable

INPUT_ERRORS = (ConfigError, DataError, ModelError, PlacementError)
DETAILS = "error.txt"


def short_message(error: EngineError) -> str:
    """The error's first line; all of a PlacementError, with its table."""
    text = str(error).strip()
    return text if isinstance(error, PlacementError) else text.partition("\n")[0]


@contextlib.contextmanager
def error_details_file(folder: Path) -> Iterator[None]:
    """Write the tracebacks of a failed run to `error.txt` in `folder`, and name it in the error."""
    path = folder / DETAILS
    path.unlink(missing_ok=True)
    try:
        yield
    except EngineError as error:
        if isinstance(error, (*INPUT_ERRORS, PreemptedError)):
            raise
        with contextlib.suppress(OSError):  # a full disk may be the very cause
            path.write_text(presentable("".join(traceback.format_exception(error))))
        where = f" (tracebacks: {path})" if path.exists() else ""
        raise type(error)(f"{short_message(error)}{where}") from error
