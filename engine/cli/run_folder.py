"""The folder of a run: made before any compute; whole models, and what made a run fail, in it."""

import contextlib
import shutil
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from engine import errors
from engine.checkpoint import Checkpoint, find_latest
from engine.cli.settings import RunOutputConfig
from engine.console import human_time
from engine.redaction import presentable
from engine.storage.filesystem import fsync_tree, replace_folder, writing

INPUT_ERRORS = (errors.ConfigError, errors.DataError, errors.ModelError, errors.PlacementError)
DETAILS = "error.txt"
_WAY_OUT = "free space, or give another trainer.default_local_dir"
# Ray unpacks a job's files here on each machine, and deletes them after the job.
_RAY_JOB_FOLDERS = "runtime_resources/working_dir_files"


def short_message(error: errors.EngineError) -> str:
    """Return the error's first line; all of a PlacementError, with its table."""
    text = str(error).strip()
    return text if isinstance(error, errors.PlacementError) else text.partition("\n")[0]


@contextlib.contextmanager
def error_details_file(folder: Path) -> Iterator[None]:
    """Write the tracebacks of a failed run to `error.txt` in `folder`, and name it in the error."""
    path = folder / DETAILS
    path.unlink(missing_ok=True)
    try:
        yield
    except errors.EngineError as error:
        if isinstance(error, (*INPUT_ERRORS, errors.PreemptedError)):
            raise
        with contextlib.suppress(OSError):  # a full disk may be the very cause
            path.write_text(presentable("".join(traceback.format_exception(error))))
        where = f" (tracebacks: {path})" if path.exists() else ""
        raise error.with_message(f"{short_message(error)}{where}") from error


def local_model(model: str) -> str:
    """Return a folder as an absolute path, for workers in other directories; a hub id as it is."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.is_dir() else model


def make_output_folder(folder: Path) -> Path:
    """Make the output folder of a run; raise before any compute where it can't be written."""
    folder = folder.expanduser().absolute()
    if _RAY_JOB_FOLDERS in str(folder):
        raise errors.ConfigError(
            f"trainer.default_local_dir={folder} lies in the working directory of a Ray job, which "
            "is deleted after it; give an absolute path, or set HYBRIDFLYTE_HOME to one"
        )
    with writing(folder, _WAY_OUT):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return folder


def checkpoint_folder(folder: Path, resume_mode: str) -> Path:
    """Return where checkpoints go: a new place each time, unless `resume_mode` is auto."""
    if resume_mode == "auto":
        return folder / "checkpoints"
    # With resume_path, too: what lies in "checkpoints" would come before the one that is named.
    return folder / f"checkpoints.{time.strftime('%Y%m%d-%H%M%S')}"


def plan_lines(
    run: RunOutputConfig,
    steps: int,
    step_seconds: float | None,
    check: Callable[[Checkpoint], object],
) -> Iterator[str]:
    """Yield what of a run is done already, and what the rest takes and costs, for a dry run.

    `check` raises for a checkpoint that the run could not resume from.
    """
    checkpoints = checkpoint_folder(run.folder(), run.resume_mode)
    checkpoint = find_latest(checkpoints) if checkpoints.is_dir() else None
    saved, done = f"nothing in {checkpoints}", 0
    if checkpoint is not None:
        check(checkpoint)
        done = checkpoint.step
        saved = f"step {done} of {steps} is in {checkpoints}"
    rest = max(0, steps - done)
    yield f"cached    {saved}; {rest} steps are to be done"
    if step_seconds is None:
        return
    seconds = rest * step_seconds
    yield f"total     {human_time(seconds)}, roughly; validation, saving and the start come on top"
    cost = f"{seconds / 3600 * run.price_per_hour:.2f}, at {run.price_per_hour:g} an hour"
    yield f"cost      {cost if run.price_per_hour else 'not known; set run.price_per_hour'}"


def save_atomically(save: Callable[[str], None], target: Path) -> Path:
    """Let `save(folder)` write beside `target`, then replace `target` by that folder.

    Raises StorageError when the disk refuses, or `save` wrote to another machine's disk.
    """
    name = uuid.uuid4().hex[:8]
    draft, replaced = (target.with_name(f".{target.name}-{kind}-{name}") for kind in ("new", "old"))
    try:
        save(str(draft))
        if not draft.is_dir():
            raise errors.StorageError(
                f"the policy wrote its model on another machine, where {draft} is; put "
                "trainer.default_local_dir on a file system that all machines share"
            )
        with writing(target, _WAY_OUT):
            fsync_tree(draft)
            replace_folder(draft, target, replaced)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target
