"""Retries of a run, RL or warm start: after a lost worker it resumes from its last checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from engine.checkpoint import find_latest
from engine.controller.attempts import RetryBudget
from engine.controller.local_groups import threads_left_behind
from engine.errors import DamagedCheckpointError, WorkerError

log = logging.getLogger(__name__)
T = TypeVar("T")


def run_with_retries(
    make: Callable[[], AbstractContextManager[T]],
    work: Callable[[T], None],
    checkpoint_dir: str | Path,
    max_attempts: int,
) -> None:
    """Call `work` with a trainer; after a WorkerError again with a new one, which resumes.

    Raises the last WorkerError when `max_attempts` attempts in a row got past no new checkpoint,
    or where a call in this process can't be ended: only a new process is rid of it.
    """
    budget = RetryBudget(max_attempts)
    while True:
        try:
            with make() as trainer:
                work(trainer)
            return
        except WorkerError as error:
            at = _newest_step(checkpoint_dir)
            budget = budget.after_failure(at)
            if not budget.may_retry or threads_left_behind():
                raise
            log.warning("a worker was lost (%s); resuming from step %d", _first(error), at)


def _newest_step(checkpoint_dir: str | Path) -> int:
    """The step that the next attempt begins after; 0 where it has to say that all are damaged."""
    try:
        found = find_latest(checkpoint_dir)
    except DamagedCheckpointError:
        return 0
    return found.step if found else 0


def _first(error: Exception) -> str:
    return str(error).splitlines()[0]
