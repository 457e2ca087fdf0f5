"""Model folders of a run: written under another name, then renamed, so that each is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.errors import ConfigError, StorageError
from engine.storage.atomic import fsync, fsync_tree

# Ray unpacks a job's files here on each machine, and deletes them after the job.
_RAY_JOB_FOLDERS = "runtime_resources/working_dir_files"


def make_output_folder(folder: Path) -> Path:
    """Make the output folder of a run; raise before any compute where it can't be written."""
    folder = folder.expanduser().absolute()
    if _RAY_JOB_FOLDERS in str(folder):
        raise ConfigError(
            f"trainer.default_local_dir={folder} lies in the working directory of a Ray job, which "
            "is deleted after it; give an absolute path, or set HYBRIDFLYTE_HOME to one"
        )
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
        probe.touch()
        probe.unlink()
    return folder


def save_atomically(save: Callable[[str], None], target: Path) -> Path:
    """Let `save(folder)` write beside `target`, then replace `target` by that folder.

    Raises StorageError when the disk refuses, or `save` wrote to another machine's disk.
    """
    name = uuid.uuid4().hex[:8]
    draft, replaced = (target.with_name(f".{target.name}-{kind}-{name}") for kind in ("new", "old"))
    try:
        save(str(draft))
        if not draft.is_dir():
            raise StorageError(
                f"the policy wrote its model on another machine, where {draft} is; put "
                "trainer.default_local_dir on a file system that all machines share"
            )
        with _writing(target):
            fsync_tree(draft)
            if target.exists():
                os.rename(target, replaced)
            os.rename(draft, target)
            fsync(target.parent)
    finally:
        if replaced.exists() and not target.exists():
            os.rename(replaced, target)
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
    return target


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"can't write {error.filename or path}: {error.strerror or error}; free space, or give "
            "another trainer.default_local_dir"
        ) from error
