"""Writes to a local disk that are whole or not there: temporary name, fsync, rename."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file whole or not at all, replacing what is there; raise OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb", buffering=0) as file:
            for chunk in chunks:
                view = memoryview(chunk)
                while len(view):
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


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


def process_is_alive(pid: int) -> bool:
    """Tell whether a process of this machine still runs."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number that large
        return False
    except PermissionError:
        return True
    return True


def process_start(pid: int) -> str | None:
    """When a process of this machine began, as a text to compare; None for one that has ended.

    Together with its number this names a process: numbers come again. A zombie has ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if not Path("/proc/self/stat").exists() and process_is_alive(pid) else None
    return None if fields[0] in ("Z", "X") else fields[19]
