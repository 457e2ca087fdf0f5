"""How many attempts follow one that failed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from engine.checkpoint import CheckpointStore, Saver
from engine.errors import WorkerError
from engine.trainers.resume import run_with_retries


def attempts(folder: Path, steps: Sequence[int], max_attempts: int) -> int:
    """Attempts of a run whose n-th one saves step `steps[n]`, if that is later, and then fails."""
    made = list[int]()

    def work(_: None) -> None:
        saver = Saver(CheckpointStore(folder), {})
        made.append(steps[len(made)])
        if made[-1] > max(made[:-1], default=0):
            saver.save(made[-1], {})
            saver.wait()
        raise WorkerError("lost")

    with pytest.raises(WorkerError, match="lost"):
        run_with_retries(nullcontext, work, folder, max_attempts)
    return len(made)


def test_retries_are_bounded_at_the_same_checkpoint_and_begin_anew_after_progress(
    tmp_path: Path,
) -> None:
    assert attempts(tmp_path / "a", (0, 0, 10, 10, 5), max_attempts=3) == 5
    assert attempts(tmp_path / "b", (7,), max_attempts=1) == 1


def test_a_run_that_always_gets_on_is_never_given_up(tmp_path: Path) -> None:
    assert attempts(tmp_path, (*range(1, 9), 8), max_attempts=2) == 9
