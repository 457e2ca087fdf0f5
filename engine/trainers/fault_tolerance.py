"""How a training run ends and goes on: pre-emption, its last step saved, and retries."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self, TypeVar

from engine import errors
from engine.checkpoint import Saver, find_latest
from engine.controller.local_groups import threads_left_behind

log = logging.getLogger(__name__)


class PreemptionNotice:
    """Watches for SIGTERM while training runs; a context manager.

    After the signal `received` is true, and the training code has `grace_s` seconds to finish its
    step and save; then PreemptedError is raised wherever the main thread is. Outside of the main
    thread, where Python delivers no signals, `received` stays false.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s, self._at = grace_s, 0.0
        self.step = 0  # the one that is being taken, for messages
        self._main = threading.current_thread() is threading.main_thread()
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def received(self) -> bool:
        return self._at > 0.0

    def seconds_left(self) -> float:
        """Seconds until the deadline; `grace_s` before the signal."""
        if not self.received:
            return self._grace_s
        return max(0.0, self._at + self._grace_s - time.monotonic())

    def __enter__(self) -> Self:
        if self._main:
            handlers = ((signal.SIGTERM, self._on_sigterm), (signal.SIGALRM, self._on_deadline))
            self._before = {number: signal.signal(number, handler) for number, handler in handlers}
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self._at = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
            log.warning(
                "SIGTERM: the current step is finished and saved, within %g s", self._grace_s
            )

    def _on_deadline(self, number: int, frame: FrameType | None) -> NoReturn:
        raise errors.PreemptedError(
            f"pre-empted, and no step was finished and saved in {self._grace_s:g} s; the run "
            "resumes from the checkpoint before (trainer.save_freq, trainer.preemption_grace_s)"
        )


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
        raise errors.PreemptedError(
            f"pre-empted after step {step}, without a checkpoint folder: the run starts again from "
            "the beginning"
        )
    _is_durable(saver)
    saved = "" if saver.unsaved_step is None else ", which was not saved"
    raise errors.PreemptedError(
        f"pre-empted after step {step}{saved}; the run continues from {_next_start(saver)}"
    )


@contextmanager
def finish_save_on_error(saver: Saver | None, notice: PreemptionNotice) -> Iterator[None]:
    """On any exception, give the save in flight as long as a pre-emption notice would."""
    try:
        yield
    except BaseException as error:
        if saver is not None:
            saver.drain(notice.seconds_left())
        if saver is None or not isinstance(error, errors.DivergedError):
            raise
        raise errors.DivergedError(
            f"{error}; the last good step is that of {_next_start(saver)}: a run that is started "
            "again with a lower learning rate goes on from there"
        ) from error


@contextmanager
def lost_workers_explained(notice: PreemptionNotice) -> Iterator[None]:
    """After a notice, workers may be stopped before this process: that is a pre-emption."""
    try:
        yield
    except errors.WorkerError as error:
        if not notice.received:
            raise
        raise errors.PreemptedError(
            f"pre-empted in step {notice.step}, whose workers are gone; the run continues from its "
            "last checkpoint"
        ) from error


def _next_start(saver: Saver) -> str:
    """Where a run that is started again begins, by what is in the folder now."""
    try:
        newest = saver.store.latest()
    except errors.CheckpointError as error:
        return f"the newest good checkpoint in {saver.store.root}, which can't be read now: {error}"
    return "the beginning" if newest is None else newest.folder


def _is_durable(saver: Saver) -> bool:
    """Wait for the save in flight; return whether the last one is durable. Logs a failure."""
    try:
        saver.wait()
    except errors.CheckpointError as error:
        log.warning("no checkpoint at step %s: %s", saver.unsaved_step, error)
    return saver.unsaved_step is None


T = TypeVar("T")


def run_with_retries(
    make: Callable[[], AbstractContextManager[T]],
    work: Callable[[T], None],
    checkpoint_dir: str | Path,
    max_attempts: int,
) -> None:
    """Call `work` with a trainer; after a WorkerError again with a new one, which resumes.

    A trainer rank isn't replaced alone, as a rollout worker is: all ranks share each step. Raises
    the last WorkerError when `max_attempts` attempts in a row got past no new checkpoint (so rare
    failures in a long run don't count), or where a call in this process can't be ended.
    """
    failed = newest = 0  # attempts that got past no new checkpoint; the step of the newest
    while True:
        try:
            with make() as trainer:
                work(trainer)
            return
        except errors.WorkerError as error:
            try:
                checkpoint = find_latest(checkpoint_dir)
            except errors.DamagedCheckpointError:  # the next attempt says that all are
                checkpoint = None
            step, cause = checkpoint.step if checkpoint else 0, str(error).splitlines()[0]
            failed = 1 if step > newest else failed + 1
            newest = max(newest, step)
            if failed >= max_attempts or threads_left_behind():
                raise
            log.warning("a worker was lost (%s); resuming from step %d", cause, step)
