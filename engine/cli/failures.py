"""Failures as one sentence on the terminal, with all the rest in a file."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from engine.errors import ConfigError, DataError, EngineError, ModelError, PlacementError

INPUT_ERRORS = (ConfigError, DataError, ModelError, PlacementError)
DETAILS = "error.txt"


def sentence(error: EngineError) -> str:
    """The error's first line; a placement's whole text, because its table says what is short."""
    text = str(error).strip()
    return text if isinstance(error, PlacementError) else text.partition("\n")[0]


@contextlib.contextmanager
def details_kept(folder: Path) -> Iterator[None]:
    """Write the tracebacks of a failed run to `error.txt` in `folder`, and say so in the error."""
    path = folder / DETAILS
    path.unlink(missing_ok=True)
    try:
        yield
    except EngineError as error:
        if isinstance(error, INPUT_ERRORS):
            raise
        with contextlib.suppress(OSError):  # a full disk may be the very cause
            path.write_text("".join(traceback.format_exception(error)))
        where = f" (tracebacks: {path})" if path.exists() else ""
        raise type(error)(f"{sentence(error)}{where}") from error
