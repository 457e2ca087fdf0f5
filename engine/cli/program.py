"""What every `python -m engine.main_…` does around its run: signals, exit status, errors.

It loads nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from engine.console import INTERRUPTED, quiet, say
from engine.errors import (
    ConfigError,
    DataError,
    EngineError,
    ModelError,
    PlacementError,
    PreemptedError,
    StorageError,
)
from engine.redaction import presentable
from engine.storage.filesystem import fsync, fsync_tree

# Failures as one sentence on the terminal, with the tracebacks in a file.

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


# What every `python -m engine.main_…` does around its run: signals, exit status, short errors.

FAILED, WRONG_INPUT, TERMINATED = 1, 2, 143


def run_program(run: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    """Run a command line (None: the process's); return its exit status.

    0, 1 where the run failed, 2 for wrong input, 130 after Ctrl-C, 143 after SIGTERM. Workers are
    stopped in all cases.
    """
    quiet()
    try:
        with _sigterm_as_exception():
            return run(sys.argv[1:] if arguments is None else arguments)
    except PreemptedError as error:
        say(str(error), error=True)
        return _terminated()
    except EngineError as error:
        say(f"error: {short_message(error)}", error=True)
        return WRONG_INPUT if isinstance(error, INPUT_ERRORS) else FAILED
    except KeyboardInterrupt:
        print("interrupted; workers are stopped", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:
        if stop.code != signal.SIGTERM:
            raise
        return _terminated()


def _terminated() -> int:
    print("terminated; workers are stopped", file=sys.stderr)
    return TERMINATED


@contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    """Let SIGTERM unwind the block, so that workers are stopped and files are closed."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(int(signal.SIGTERM))  # as Ray's own handler does while it starts

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# Model folders of a run: written under another name, then renamed, so that each is complete.

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
