"""How a run ends: with its last step saved, after a pre-emption notice, or by an error.

The same for the warm start and RL. What a save holds is theirs, how it is written
`engine.checkpoint`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from engine.checkpoint import Saver
from engine.errors import CheckpointError, PreemptedError
from engine.preemption import Notice

log = logging.getLogger(__name__)


def settle(saver: Saver | None, again: Callable[[], None]) -> None:
    """Wait for the last save; where it failed, have `again` start it once more.

    What fails twice is said aloud, and raises nothing: what was trained is worth more than its
    last checkpoint, and the caller saves the model.
    """
    if saver is None or _is_durable(saver):
        return
    again()
    if not _is_durable(saver):
        log.error(
            "the last step, %d, has NO CHECKPOINT: its save failed twice. The trained model is "
            "handed over all the same; a run that is started again trains once more from %s. Look "
            "at %s before it is needed",
            saver.owed,
            "the beginning" if saver.last is None else saver.last.folder,
            saver.store.root,
        )


def leave(saver: Saver | None, step: int) -> NoReturn:
    """End after a pre-emption notice, with `step` saved where there is a checkpoint folder."""
    if saver is None:
        raise PreemptedError(
            f"pre-empted after step {step}, without a checkpoint folder: the run starts again from "
            "the beginning"
        )
    _is_durable(saver)
    raise PreemptedError(
        f"pre-empted after step {step}; the run goes on from {saver.last.folder}"
        if saver.last is not None
        else f"pre-empted after step {step}, which was not saved; the run goes on from the newest "
        f"checkpoint in {saver.store.root}, or from the beginning where there is none"
    )


@contextmanager
def last_save_kept(saver: Saver | None, notice: Notice) -> Iterator[None]:
    """What breaks off the block leaves the save under way the time that a notice would."""
    try:
        yield
    except BaseException:
        if saver is not None:
            saver.break_off(notice.left_s())
        raise


def _is_durable(saver: Saver) -> bool:
    """Wait for the save in flight; whether the one asked for last is there. Says what failed."""
    try:
        saver.wait()
    except CheckpointError as error:
        log.warning("no checkpoint at step %s: %s", saver.owed, error)
    return saver.owed is None
