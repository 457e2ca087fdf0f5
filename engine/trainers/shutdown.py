"""How a training run ends: with its last step saved, on a pre-emption notice, or by an error.

Shared by SFT and RL.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from engine.checkpoint import Saver
from engine.errors import CheckpointError, DivergedError, PreemptedError, WorkerError
from engine.trainers.preemption import PreemptionNotice

log = logging.getLogger(__name__)


def ensure_last_save(saver: Saver | None, save: Callable[[], None]) -> None:
    """Wait for the last save; if it failed, start it once more with `save`.

    A second failure is logged as an error and not raised: the trained model is worth more than its
    last checkpoint, and the caller saves it.
    """
    if saver is None or _is_durable(saver):
        return
    save()
    if not _is_durable(saver):
        log.error(
            "the last step, %d, has NO CHECKPOINT: its save failed twice. The trained model is "
            "handed over all the same; a run that is started again trains once more from %s. Look "
            "at %s before it is needed",
            saver.unsaved_step,
            _next_start(saver),
            saver.store.root,
        )


def raise_preempted(saver: Saver | None, step: int) -> NoReturn:
    """Wait for the save of `step`, if the run has checkpoints, and raise PreemptedError."""
    if saver is None:
        raise PreemptedError(
            f"pre-empted after step {step}, without a checkpoint folder: the run starts again from "
            "the beginning"
        )
    _is_durable(saver)
    saved = "" if saver.unsaved_step is None else ", which was not saved"
    raise PreemptedError(
        f"pre-empted after step {step}{saved}; the run continues from {_next_start(saver)}"
    )


@contextmanager
def finish_save_on_error(saver: Saver | None, notice: PreemptionNotice) -> Iterator[None]:
    """On any exception, give the save in flight as long as a pre-emption notice would.

    A DivergedError gets the name of the checkpoint to go on from.
    """
    try:
        yield
    except BaseException as error:
        if saver is None:
            raise
        saver.drain(notice.seconds_left())
        if isinstance(error, DivergedError):
            raise DivergedError(
                f"{error}; the last good step is that of {_next_start(saver)}: a run that is "
                "started again with a lower learning rate goes on from there"
            ) from error
        raise


@contextmanager
def lost_workers_explained(notice: PreemptionNotice, step: int) -> Iterator[None]:
    """After a notice, workers may be stopped before this process: that is a pre-emption."""
    try:
        yield
    except WorkerError as error:
        if not notice.received:
            raise
        raise PreemptedError(
            f"pre-empted in step {step}, whose workers are gone; the run continues from its last "
            "checkpoint"
        ) from error


def _next_start(saver: Saver) -> str:
    """Where a run that is started again begins: a look at the folder itself, and not at what this
    process has saved, for it may have resumed with another saver."""
    try:
        newest = saver.store.latest()
    except CheckpointError as error:
        return f"the newest good checkpoint in {saver.store.root}, which can't be read now: {error}"
    return "the beginning" if newest is None else newest.folder


def _is_durable(saver: Saver) -> bool:
    """Wait for the save in flight; return whether the last one is durable. Logs a failure."""
    try:
        saver.wait()
    except CheckpointError as error:
        log.warning("no checkpoint at step %s: %s", saver.unsaved_step, error)
    return saver.unsaved_step is None
