"""Forcing what was written to disk, so that a rename never shows a folder whose files are not."""

from __future__ import annotations

import os
from pathlib import Path


def fsync_tree(folder: Path) -> None:
    """Force the content of every file and folder below `folder` to disk; raise OSError."""
    for base, _, files in os.walk(folder):
        for name in files:
            fsync(Path(base) / name)
        fsync(Path(base))


def fsync(path: Path) -> None:
    """Force one file, or the list of a folder's names, to disk; raise OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
