"""Killed and hung processes in mid-run: rollout workers are replaced, a dead trainer is named."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import ray
from tiny_engine import arithmetic_rows

from engine.config import RLConfig
from engine.controller import async_rollout
from engine.data.loader import PromptLoader
from engine.errors import WorkerError
from engine.trainers.rl import RLTrainer

pytestmark = pytest.mark.usefixtures("one_thread", "ray_cluster")


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
        state.check()  # no prompt lost or doubled
        assert state.consumed == 40
        assert max(metrics["staleness/max"] for metrics in history) <= 1
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not psutil.pid_exists(pids[0])


@pytest.mark.slow
def test_workers_that_keep_dying_end_the_run_with_the_first_cause(tiny_folder: Path) -> None:
    with trainer(tiny_folder, max_rollout_restarts=0) as subject:
        subject.on_step = at_step(2, lambda: os.kill(pid_of("sampler0"), signal.SIGKILL))
        with pytest.raises(
            WorkerError, match=r"all 1 rollout workers failed; first cause: sampler0: .*died"
        ):
            subject.fit()


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
