"""Where artifacts are kept on this machine; only paths, nothing is read or written here."""

from __future__ import annotations

import os
from pathlib import Path

HOME_VARIABLE = "HYBRIDFLYTE_HOME"
ARTIFACTS = "artifacts"


def home() -> Path:
    """Return the absolute folder of all outputs: $HYBRIDFLYTE_HOME, or ./outputs."""
    return Path(os.environ.get(HOME_VARIABLE) or "outputs").expanduser().absolute()


def artifact_path(kind: str, digest: str) -> Path:
    """Return where the artifact with this content digest (hex) is or would be published."""
    return home() / ARTIFACTS / kind / digest[:16]
