"""Retries of an RL run: after a lost worker it resumes from its last checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from engine.checkpoint import find_latest
from engine.controller.attempts import RetryBudget
from engine.errors import WorkerError
from engine.trainers.rl import RLTrainer

log = logging.getLogger(__name__)


def run_with_retries(
    make: Callable[[], RLTrainer],
    work: Callable[[RLTrainer], None],
    checkpoint_dir: str | Path,
    max_attempts: int,
) -> None:
    """Call `work` with a trainer; after a WorkerError again with a new one, which resumes.

    Raises the last WorkerError when `max_attempts` attempts in a row got past no new checkpoint.
    """
    budget = RetryBudget(max_attempts)
    while True:
        try:
            with make() as trainer:
                work(trainer)
            return
        except WorkerError as error:
            found = find_latest(checkpoint_dir)
            at = found.step if found else 0
            budget = budget.after_failure(at)
            if not budget.may_retry:
                raise
            log.warning("a worker was lost (%s); resuming from step %d", _first(error), at)


def _first(error: Exception) -> str:
    return str(error).splitlines()[0]
