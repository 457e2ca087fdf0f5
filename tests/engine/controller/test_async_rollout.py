"""Asynchronous rollout and its attempts."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch, Future, Ready
from engine.checkpoint import CheckpointStore, Saver
from engine.controller.async_rollout import AsyncRollout, PublishedWeights
from engine.controller.rollout_queue import AdmissionLimits
from engine.controller.supervision import HealthPolicy
from engine.errors import PlacementError, WorkerError
from engine.trainers.resume import run_with_retries
from engine.workers.rollout_worker import PollResult


class Failed(Future[Any]):
    """A call that has failed."""

    def __init__(self, error: WorkerError) -> None:
        self.error = error

    def result(self, until: float | None = None) -> Any:
        raise self.error

    def done(self) -> bool:
        return True

    def failure(self) -> WorkerError:
        return self.error


class Sampler:
    """Decodes nothing, and is full from `room` groups on; in place of a process and its roles."""

    def __init__(self, room: int) -> None:
        self.room, self.groups, self.calls = room, 0, 0

    def __getitem__(self, name: str) -> Sampler:
        return self

    def load_weights(self, weights: Future[Batch]) -> Future[int]:
        return Ready(0)

    def poll(self, prompts: Batch | None, seconds: float, report: bool) -> Future[PollResult]:
        self.groups += 0 if prompts is None else len(prompts)
        self.calls += 1
        full = self.groups >= self.room
        return Ready(PollResult((), busy=self.groups, version=0, full=full))

    def close(self) -> None: ...


def test_memory_bounds_what_a_sampler_begins() -> None:
    """One whose engine has no room for what it has gets no further groups; others do."""
    small, large = Sampler(1), Sampler(100)
    samplers: dict[str, Any] = {"small": small, "large": large}
    up = threading.Event()
    drawn = iter(range(1000))

    def spawn(name: str, attempt: int) -> Any:
        if name == "large":
            up.wait(20)
        return samplers[name]

    def next_prompt() -> Batch:
        return Batch({"group_ids": torch.tensor([next(drawn)])}, {"prompt_ids": [[5]]})

    with contextlib.closing(
        AsyncRollout(
            list(samplers),
            AdmissionLimits(batch=8, staleness=1),
            HealthPolicy(),
            spawn=spawn,
            next_prompt=next_prompt,
            score=Ready,
            weights=PublishedWeights(0, Ready(Batch({"x": torch.zeros(1)}))),
        )
    ):
        _until(lambda: small.calls > 5)
        first = small.groups
        assert 0 < first < 16, "its share of the room, as long as it had not said that it is full"
        up.set()
        _until(lambda: large.groups == 16 - first and large.calls > 5)
        assert small.groups == first


@pytest.mark.parametrize("whose", ["actor", "sampler"])
def test_weights_that_the_actor_can_t_give_are_no_fault_of_the_sampler(whose: str) -> None:
    """A sampler that can't load them is replaced; the actor's failure ends the rollout at once."""

    class Unable(Sampler):
        def load_weights(self, weights: Future[Batch]) -> Future[int]:
            return Failed(WorkerError(f"{whose} rank 0 failed"))

    spawned: list[int] = []

    def spawn(name: str, attempt: int) -> Any:
        spawned.append(attempt)
        return Unable(1)

    full: Future[Batch] = Ready(Batch({"x": torch.zeros(1)}))
    if whose == "actor":
        full = Failed(WorkerError("actor rank 0 failed"))
    with contextlib.closing(
        AsyncRollout(
            ["sampler0"],
            AdmissionLimits(batch=8, staleness=1),
            HealthPolicy(max_restarts=2),
            spawn=spawn,
            next_prompt=lambda: Batch({"group_ids": torch.zeros(1)}, {"prompt_ids": [[5]]}),
            score=Ready,
            weights=PublishedWeights(0, full),
            timeout_s=20.0,
        )
    ) as rollout:
        with pytest.raises(WorkerError, match=f"{whose} rank 0 failed"):
            rollout.take()
        assert spawned == ([0] if whose == "actor" else [0, 1, 2])


@pytest.mark.parametrize("placed", [(), ("sampler0",)])
def test_a_cluster_without_room_ends_the_rollout_unless_another_sampler_runs(
    placed: tuple[str, ...],
) -> None:
    """Both are tried once; where one runs, the other is tried again, and given up."""
    spawned: list[str] = []
    sampler, drawn = Sampler(100), itertools.count()

    def spawn(name: str, attempt: int) -> Any:
        spawned.append(name)
        if name in placed:
            return sampler
        raise PlacementError(f"no room for {name}")

    with contextlib.closing(
        AsyncRollout(
            ["sampler0", "sampler1"],
            AdmissionLimits(batch=8, staleness=1),
            HealthPolicy(max_restarts=2, backoff=0.01 if placed else 1.0),
            spawn=spawn,
            next_prompt=lambda: Batch(
                {"group_ids": torch.tensor([next(drawn)])}, {"prompt_ids": [[5]]}
            ),
            score=Ready,
            weights=PublishedWeights(0, Ready(Batch({"x": torch.zeros(1)}))),
            timeout_s=20.0,
        )
    ) as rollout:
        if placed:
            _until(lambda: str(rollout.fleet.workers["sampler1"].state) == "failed")
            assert spawned.count("sampler1") == 3
            calls = sampler.calls
            _until(lambda: sampler.calls > calls)
        else:
            with pytest.raises(PlacementError, match="no room for sampler"):
                rollout.take()
            assert sorted(spawned) == ["sampler0", "sampler1"]


class Validator(Sampler):
    """Samples apart what it is given, a prompt a poll, unless it `fails`."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__(100)
        self.fails, self.apart = fails, list[Batch]()
        self.given: list[int] = []

    def begin_apart(self, prompts: Batch, draws: str) -> Future[None]:
        self.apart = [prompts.rows([row]) for row in range(len(prompts))]
        self.given += prompts["group_ids"].tolist()
        return Ready(None)

    def poll(self, prompts: Batch | None, seconds: float, report: bool) -> Future[PollResult]:
        if self.apart and self.fails:
            self.fails -= 1
            return Failed(WorkerError("its GPU is lost"))
        done = (self.apart.pop(0),) if self.apart else ()
        return Ready(PollResult((), busy=len(self.apart), version=0, apart=done))


def validating(samplers: dict[str, Any], health: HealthPolicy, timeout_s: float) -> AsyncRollout:
    return AsyncRollout(
        list(samplers),
        AdmissionLimits(batch=8, staleness=1, steps=0),
        health,
        spawn=lambda name, attempt: samplers[name],
        next_prompt=lambda: pytest.fail("a validation draws no prompts"),
        score=Ready,
        weights=PublishedWeights(0, Ready(Batch({"x": torch.zeros(1)}))),
        timeout_s=timeout_s,
    )


PROMPTS = Batch({"group_ids": torch.tensor([4, 2, 9, 7])}, {"prompt_ids": [[5], [6], [7], [8]]})


def test_a_lost_sampler_s_share_is_sampled_again() -> None:
    samplers = {"sound": Validator(), "lost": Validator(fails=1)}
    health = HealthPolicy(backoff=0.01)
    with contextlib.closing(validating(samplers, health, 20.0)) as rollout:
        for _ in range(2):
            batch = rollout.sample(PROMPTS, "validation")
            assert batch["group_ids"].tolist() == [4, 2, 9, 7]
    assert sorted(samplers["sound"].given + samplers["lost"].given)[::2] != [2, 4, 7, 9]
    assert "its GPU is lost" in rollout.causes[0]


def test_samplers_that_can_t_validate_end_it_with_the_cause() -> None:
    with (
        contextlib.closing(validating({"a": Validator(9)}, HealthPolicy(backoff=99), 1.0)) as late,
        pytest.raises(WorkerError, match=r"version 0 were not sampled .* 1 s.*a dead.*GPU is lost"),
    ):
        late.sample(PROMPTS, "validation")
    gone = HealthPolicy(max_restarts=0)
    with (
        contextlib.closing(validating({"a": Validator(9)}, gone, 20.0)) as rollout,
        pytest.raises(WorkerError, match=r"all 1 rollout workers failed.*its GPU is lost"),
    ):
        rollout.sample(PROMPTS, "validation")


def _until(done: Any) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
