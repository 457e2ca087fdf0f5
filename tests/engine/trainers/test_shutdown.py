"""Ends of a run, on savers whose store refuses or is slow: nothing that was asked for is lost."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from engine.checkpoint import Checkpoint, CheckpointDraft, CheckpointStore, Saver, find_latest
from engine.errors import PreemptedError
from engine.storage.folder import CheckpointStorageError
from engine.trainers.resume import (
    PreemptionNotice,
    ensure_last_save,
    finish_save_on_error,
    raise_preempted,
)


class RefusingStore(CheckpointStore):
    """Refuses a step's commit as often as it is named."""

    def __init__(self, root: Path, *refused: int) -> None:
        super().__init__(root)
        self.refused = list(refused)

    def commit(self, draft: CheckpointDraft) -> Checkpoint:
        if draft.step in self.refused:
            self.refused.remove(draft.step)
            raise CheckpointStorageError(f"S3 refused step {draft.step}")
        return super().commit(draft)


def saver(root: Path, *refused: int) -> Saver:
    return Saver(RefusingStore(root, *refused), {})


@pytest.mark.parametrize(("refused", "kept"), [((), 4), ((4,), 4), ((4, 4), 2), ((2, 4), 4)])
def test_the_last_save_is_tried_twice_and_costs_nothing_but_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: tuple[int, ...], kept: int
) -> None:
    saving = saver(tmp_path, *refused)
    with caplog.at_level(logging.WARNING):
        for step in (2, 4):
            saving.save(step, {"step": step})
        ensure_last_save(saving, lambda: saving.save(4, {"step": 4}))
    found = find_latest(tmp_path)
    assert found is not None
    assert (found.step, found.state) == (kept, {"step": kept})
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == (kept == 2)
    assert all("step, 4, has NO CHECKPOINT: its save failed twice" in e for e in errors)
    assert all(f"trains once more from {tmp_path}/step_2" in e for e in errors)


def test_a_checkpoint_of_the_attempt_before_is_where_the_next_one_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = saver(tmp_path)
    before.save(2, {})
    before.wait()
    saving = saver(tmp_path, 4, 4)
    saving.save(4, {})
    ensure_last_save(saving, lambda: saving.save(4, {}))
    assert f"is started again trains once more from {tmp_path}/step_2" in caplog.text


def test_nothing_asked_for_is_nothing_to_settle(tmp_path: Path) -> None:
    ensure_last_save(saver(tmp_path), lambda: pytest.fail("saved"))
    ensure_last_save(None, lambda: pytest.fail("saved"))


@pytest.mark.parametrize(
    ("refused", "match"),
    [
        ((), r"after step 4; the run continues from .*/step_4$"),
        ((4,), r"after step 4, which was not saved; the run continues from .*/step_2$"),
        ((2, 4), r"after step 4, which was not saved; the run continues from the beginning$"),
    ],
)
def test_who_leaves_says_where_the_run_goes_on(
    tmp_path: Path, refused: tuple[int, ...], match: str
) -> None:
    saving = saver(tmp_path, *refused)
    for step in (2, 4):
        saving.save(step, {})
    with pytest.raises(PreemptedError, match=match):
        raise_preempted(saving, 4)


def test_without_a_checkpoint_folder_the_run_starts_again() -> None:
    with pytest.raises(PreemptedError, match="without a checkpoint folder: the run starts again"):
        raise_preempted(None, 3)


class SlowStore(CheckpointStore):
    def commit(self, draft: CheckpointDraft) -> Checkpoint:
        threading.Event().wait(0.4)
        return super().commit(draft)


@pytest.mark.parametrize("grace_s", [30.0, 0.05])
def test_what_breaks_off_leaves_the_commit_under_way_the_grace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, grace_s: float
) -> None:
    saving = Saver(SlowStore(tmp_path), {})

    def broken_off() -> None:
        with PreemptionNotice(grace_s) as notice, finish_save_on_error(saving, notice):
            saving.save(2, {})
            raise KeyboardInterrupt

    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        broken_off()
    assert (find_latest(tmp_path) is not None) == (grace_s > 1)
    assert ("the checkpoint of step 2 may be lost" in caplog.text) == (grace_s < 1)
    saving.wait()
