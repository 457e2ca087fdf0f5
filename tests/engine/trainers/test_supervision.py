"""Supervision and the end of a run."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import ray
from tiny_engine import arithmetic_rows

from engine.checkpoint import Checkpoint, CheckpointDraft, CheckpointStore, Saver, find_latest
from engine.config import RLConfig
from engine.controller import async_rollout
from engine.data.loader import PromptLoader
from engine.errors import PreemptedError, WorkerError
from engine.storage.folder import CheckpointStorageError
from engine.trainers.resume import (
    PreemptionNotice,
    announce_preemption,
    ensure_last_save,
    finish_save_on_error,
    raise_preempted,
)
from engine.trainers.rl import RLTrainer


def trainer(folder: Path, mode: str = "async", **settings: Any) -> RLTrainer:
    config = RLConfig.model_validate(
        {
            "rollout": {"n": 4},
            "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
            "trainer": {
                "mode": mode,
                "placement": "ray",
                "total_training_steps": 10,
                "train_batch_size": 4,
                "threads": 2,
            }
            | settings,
        }
    )
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    return RLTrainer(folder, config, loader, max_response_length=6, max_model_len=40)


def pid_of(role: str) -> int:
    """The process of the running actor that holds `role`."""
    for name in ray.util.list_named_actors():
        if role in name.split("/")[1].split("+"):
            actor = ray.get_actor(name)
            return int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=30))
    raise AssertionError(f"no actor for {role}: {ray.util.list_named_actors()}")


def at_step(number: int, action: Callable[[], None]) -> Callable[..., None]:
    def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
        if step == number:
            action()

    return on_step


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> list[async_rollout.AsyncRollout]:
    """The asynchronous rollouts that a test's trainers start, for a look at their state."""
    made: list[async_rollout.AsyncRollout] = []
    real = async_rollout.AsyncRollout.__init__

    def init(self: async_rollout.AsyncRollout, *args: Any, **options: Any) -> None:
        made.append(self)
        real(self, *args, **options)

    monkeypatch.setattr(async_rollout.AsyncRollout, "__init__", init)
    return made


needs_supervision = pytest.mark.usefixtures("one_thread", "ray_cluster")


@needs_supervision
@pytest.mark.parametrize(
    ("what", "cause"),
    [(signal.SIGKILL, "died"), (signal.SIGSTOP, "no heartbeat|syncing at its deadline")],
)
@pytest.mark.slow
def test_a_lost_rollout_worker_is_replaced_and_no_prompt_is_lost(
    tiny_folder: Path,
    rollouts: list[async_rollout.AsyncRollout],
    what: signal.Signals,
    cause: str,
) -> None:
    pids: list[int] = []

    def strike() -> None:
        pids.append(pid_of("sampler0"))
        os.kill(pids[0], what)

    history: list[dict[str, float]] = []
    with trainer(tiny_folder, rollout_silence_s=8.0) as subject:
        after = at_step(3, strike)
        subject.on_step = lambda step, total, metrics: (
            history.append(dict(metrics)),
            after(step, total, metrics),
        )[0]
        subject.fit()
        state = rollouts[0].queue.admission
        assert len(history) == 10
        assert rollouts[0].restarts == 1
        assert re.search(cause, rollouts[0].causes[0])
        left = [*state.resample, *state.in_flight, *(group.ticket.key for group in state.queue)]
        assert len(set(left)) == len(left)  # no prompt doubled, and none lost
        assert state.drawn == state.consumed + state.rejected + len(left)
        assert state.consumed == 40
        assert max(metrics["staleness/max"] for metrics in history) <= 1
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not psutil.pid_exists(pids[0])


@needs_supervision
@pytest.mark.slow
def test_workers_that_keep_dying_end_the_run_with_the_first_cause(tiny_folder: Path) -> None:
    with trainer(tiny_folder, max_rollout_restarts=0) as subject:
        subject.on_step = at_step(2, lambda: os.kill(pid_of("sampler0"), signal.SIGKILL))
        with pytest.raises(
            WorkerError, match=r"all 1 rollout workers failed; first cause: sampler0: .*died"
        ):
            subject.fit()


@needs_supervision
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.slow
def test_a_dead_trainer_ends_the_attempt_within_seconds(
    tiny_folder: Path, rollouts: list[async_rollout.AsyncRollout], mode: str
) -> None:
    struck: list[float] = []

    def strike() -> None:
        struck.append(time.monotonic())
        os.kill(pid_of("actor"), signal.SIGKILL)

    with trainer(tiny_folder, mode) as subject:
        subject.on_step = at_step(2, strike)
        died = r"^(actor|rollout|reference) rank 0: \w+ failed: the worker process died"
        with pytest.raises(WorkerError, match=died):  # one process has these roles
            subject.fit()
        assert time.monotonic() - struck[0] < 15
        assert [rollout.restarts for rollout in rollouts] == [0] * (mode == "async")
    assert not [n for n in ray.util.list_named_actors() if "sampler" in n or "actor" in n]


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


def test_a_notice_outside_of_the_main_thread_is_told() -> None:
    """As on Flyte 2, which runs tasks in threads; those of the main one get the signal itself."""
    with PreemptionNotice(60.0) as in_main:
        assert not announce_preemption(), "there is no training elsewhere"
        entered, told = threading.Event(), threading.Event()
        found: list[float] = []

        def train() -> None:
            with PreemptionNotice(60.0) as notice:
                entered.set()
                told.wait(30)
                found.extend([notice.received, notice.seconds_left()])

        thread = threading.Thread(target=train)
        thread.start()
        assert entered.wait(30)
        assert announce_preemption()
        told.set()
        thread.join(30)
        assert found[0]
        assert 0 < found[1] <= 60
        assert not in_main.received
    assert not announce_preemption(), "it has ended"
