"""Asynchronous rollout and its attempts."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch, Future, Ready
from engine.checkpoint import CheckpointStore, Saver
from engine.controller.async_rollout import AsyncRollout, PublishedWeights, WeightBroadcasts
from engine.controller.rollout_queue import AdmissionLimits
from engine.controller.supervision import HealthPolicy
from engine.errors import PlacementError, WeightSyncError, WorkerError
from engine.trainers.resume import run_with_retries
from engine.weight_transfer import BroadcastRound
from engine.workers.rollout_worker import PollResult


class Failed(Future[Any]):
    """A call that has failed."""

    def __init__(self, error: WorkerError | WeightSyncError) -> None:
        self.error = error

    def result(self, until: float | None = None) -> Any:
        raise self.error

    def done(self) -> bool:
        return True

    def failure(self) -> WorkerError | WeightSyncError:
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


class Sending:
    """An actor that broadcasts, or `fails` to as often."""

    def __init__(self, fails: int = 0) -> None:
        self.fails, self.rounds, self.stored = fails, list[BroadcastRound](), 0
        self.ends: Callable[[BroadcastRound], Future[Any]] = lambda round: Ready(None)

    def broadcast_weights(self, round: BroadcastRound) -> Future[Any]:
        self.rounds.append(round)
        if len(self.rounds) <= self.fails:
            return Failed(WeightSyncError("sampler0 (rank 1) joined not within 1 s"))
        return self.ends(round)

    def weights(self) -> Future[Batch]:
        self.stored += 1
        return Ready(Batch({"x": torch.zeros(1)}))


class Receiving(Sampler):
    """Has what was broadcast, once it is told to load it."""

    def __init__(self) -> None:
        super().__init__(100)
        self.received, self.version = list[BroadcastRound](), -1

    def receive_weights(self, round: BroadcastRound) -> Future[None]:
        self.received.append(round)
        return Ready(None)

    def load_received(self, version: int) -> Future[int]:
        assert self.received[-1].version == version
        self.version = version
        return Ready(version)


@contextlib.contextmanager
def broadcasting(
    actor: Any, samplers: dict[str, Any], **options: Any
) -> Iterator[tuple[AsyncRollout, WeightBroadcasts]]:
    casts = WeightBroadcasts(actor, "gloo", "127.0.0.1", ranks=2, deadline_s=1.0, wait_s=9.0)
    drawn = itertools.count()
    with contextlib.closing(
        AsyncRollout(
            list(samplers),
            AdmissionLimits(batch=8, staleness=1),
            HealthPolicy(**options),
            spawn=lambda name, attempt: samplers[name],
            next_prompt=lambda: Batch(
                {"group_ids": torch.tensor([next(drawn)])}, {"prompt_ids": [[5]]}
            ),
            score=Ready,
            weights=casts.publish(0),
            timeout_s=0.2,
        )
    ) as rollout:
        yield rollout, casts


def has(rollout: AsyncRollout, version: int) -> bool:
    """Whether all have `version`; the trainer waits meanwhile, and begins rounds."""
    with contextlib.suppress(WorkerError):
        rollout.take()
    return all(worker.version == version for worker in rollout.fleet.workers.values())


def test_a_round_has_the_workers_that_lack_weights() -> None:
    actor, samplers = Sending(), {"b": Receiving(), "a": Receiving()}
    with broadcasting(actor, samplers) as (rollout, _):
        _until(lambda: samplers["a"].calls > 0 and samplers["b"].calls > 0)
        _until(lambda: has(rollout, 0))
        [round] = actor.rounds
        assert round.names == ("a", "a", "b", "b"), "two ranks of vLLM each"
        received = {name: sampler.received for name, sampler in samplers.items()}
        assert (round.rank, received["a"][0].rank, received["b"][0].rank) == (0, 1, 3)
        assert round.deadline_s == 1.0
        assert received["a"][0].deadline_s == 9.0, "the actor may have a step to finish"
        assert actor.stored == 0


def test_members_keep_their_group_until_others_come_or_a_round_fails() -> None:
    actor: Any = Sending()
    casts = WeightBroadcasts(actor, "gloo", "127.0.0.1", ranks=1, deadline_s=1.0, wait_s=9.0)
    rounds = [{"a": 0, "b": 0}, {"b": 0, "a": 0}, {"a": 0, "b": 1}, {"a": 0}, {"a": 0}, {"a": 0}]
    for version, members in enumerate(rounds):
        actor.fails = len(rounds) - 1 if version == len(rounds) - 2 else 0
        casts.begin(members, version)
        assert casts.poll() == (
            None if not actor.fails else "sampler0 (rank 1) joined not within 1 s"
        )
    assert [round.group for round in actor.rounds] == [1, 1, 3, 4, 4, 6]
    assert [round.version for round in actor.rounds] == list(range(6))
    casts.end("the rollout has ended")
    casts.begin({"a": 0}, 6)
    assert actor.rounds[-1].group == 7, "other processes, by the same names"


@pytest.mark.parametrize("fails", [2, 3])
def test_after_three_failed_rounds_weights_go_through_the_store(fails: int) -> None:
    class Loading(Receiving):
        loads = 0

        def load_weights(self, weights: Future[Batch]) -> Future[int]:
            self.loads += 1
            return Ready(0)

    actor, sampler = Sending(fails), Loading()
    with broadcasting(actor, {"sampler0": sampler}) as (rollout, casts):
        _until(lambda: has(rollout, 0))
        assert [round.group for round in actor.rounds] == [1, 2, 3], "a new group after each"
        assert (sampler.loads, actor.stored) == ((0, 0) if fails == 2 else (1, 1))
        assert (casts.publish(1).full is None) == (fails == 2)


def test_a_worker_lost_in_a_round_is_its_cause_and_another_round_follows() -> None:
    class Lost(Receiving):
        def receive_weights(self, round: BroadcastRound) -> Future[None]:
            return Failed(WorkerError("the worker process died"))

    samplers: dict[str, Any] = {"sampler0": Receiving(), "sampler1": Lost()}
    actor = Sending()

    class Until(Ready[Any]):
        """Ends as a broadcast does, with the round's cause in the store."""

        def __init__(self, round: BroadcastRound) -> None:
            super().__init__(None)
            self.store, self.lost = round.open_store(), "sampler1" in round.names

        def done(self) -> bool:
            return not self.lost or self.store.check(["cause"])

        def result(self, until: float | None = None) -> Any:
            if self.lost:
                raise WeightSyncError(self.store.get("cause").decode())

    actor.ends = Until
    with broadcasting(actor, samplers, max_restarts=0) as (rollout, _):
        _until(lambda: samplers["sampler0"].calls > 0 and samplers["sampler1"].calls > 0)
        _until(lambda: has(rollout, 0) or samplers["sampler0"].version == 0)
        assert rollout.causes == ["sampler1: the worker process died"]
        names = ["sampler0", "sampler0", "sampler1", "sampler1"]
        assert [list(round.names) for round in actor.rounds] == [names, names[:2]]


def test_a_worker_that_waits_for_the_trainer_is_not_given_up() -> None:
    """It answers, and nothing is sent while the trainer is at a step of its own."""
    sampler = Receiving()
    with broadcasting(Sending(), {"sampler0": sampler}, sync_timeout=0.6) as (rollout, _):
        time.sleep(1.5)
        assert rollout.restarts == 0
        assert str(rollout.fleet.workers["sampler0"].state) == "syncing"
        assert sampler.calls > 2
        _until(lambda: has(rollout, 0))
