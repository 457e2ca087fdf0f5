"""The queue of asynchronous rollout, and the staleness it bounds."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from invariants import check_admission

from engine.batch import Batch, Future
from engine.controller.rollout_queue import (
    Admission,
    AdmissionLimits,
    AdmittedGroup,
    RolloutQueue,
    Ticket,
)
from engine.errors import EngineError, RewardError, RolloutError

N = 2  # completions a group


class Reward(Future[Batch]):
    """Scores a token with its id, once `ready`."""

    def __init__(self, groups: Batch) -> None:
        self.groups, self.ready, self.error = groups, False, None

    error: EngineError | None

    def done(self) -> bool:
        return self.ready

    def failure(self) -> EngineError | None:
        return self.error if self.ready else None

    def result(self, until: float | None = None) -> Batch:
        if self.error is not None:
            raise self.error
        return Batch({"token_level_scores": self.groups["responses"].float()})


@pytest.fixture
def calls() -> list[Reward]:
    return []


@pytest.fixture
def queue(calls: list[Reward]) -> RolloutQueue:
    def score(groups: Batch) -> Reward:
        calls.append(Reward(groups))
        return calls[-1]

    keys = count()
    return RolloutQueue(
        AdmissionLimits(batch=2, staleness=1),
        0,
        next_prompt=lambda: Batch({}, {"prompt_ids": [[next(keys)]]}),
        score=score,
    )


def group(key: int, width: int) -> Batch:
    """All tokens of group `key` are 10 + key."""
    shape = (N, width)
    return Batch(
        {
            "group_ids": torch.full((N,), key),
            "responses": torch.full(shape, 10 + key),
            "response_mask": torch.ones(shape),
            "policy_version": torch.zeros(N, dtype=torch.long),
            "token_versions": torch.zeros(shape, dtype=torch.long),
        }
    )


def test_groups_of_one_poll_are_scored_in_one_call_at_their_own_width(
    queue: RolloutQueue, calls: list[Reward]
) -> None:
    queue.begin("a", 0, 3)
    queue.finish("a", [group(0, 3), group(1, 5)])
    queue.finish("a", [])
    assert len(calls) == 1
    assert len(calls[0].groups) == 2 * N
    assert not queue.poll_scores()
    assert queue.take() is None
    calls[0].ready = True
    assert queue.poll_scores()
    narrow, wide = (queue._scored[key]["token_level_scores"] for key in (0, 1))
    assert narrow.tolist() == [[10.0] * 3] * N
    assert wide.tolist() == [[11.0] * 5] * N
    taken = queue.take()
    assert taken is not None
    assert taken[1]["group_ids"].tolist() == [0, 0, 1, 1]
    assert queue.completions == 2 * N
    assert queue.tokens == 8 * N


def test_a_group_given_up_while_it_is_scored_is_sampled_again_and_the_others_count(
    queue: RolloutQueue, calls: list[Reward]
) -> None:
    queue.begin("a", 0, 1)
    queue.begin("b", 0, 2)
    queue.finish("a", [group(0, 3), group(1, 3)])  # the second is not a's
    assert len(calls[0].groups) == N
    queue.finish("b", [group(1, 4), group(2, 2)])
    queue.worker_lost("a")
    for call in calls:
        call.ready = True
    queue.poll_scores()
    assert sorted(queue._scored) == [1, 2]
    assert queue._scored[2]["token_level_scores"].tolist() == [[12.0] * 2] * N
    [again] = queue.begin("c", 0, 1)
    assert again["group_ids"].tolist() == [0]
    assert list(again.columns["prompt_ids"][0]) == [0]
    check_admission(queue.admission)


def test_a_failed_scoring_is_raised(queue: RolloutQueue, calls: list[Reward]) -> None:
    queue.begin("a", 0, 1)
    queue.finish("a", [group(0, 3)])
    calls[0].ready, calls[0].error = True, RewardError("no server")
    with pytest.raises(RewardError, match="no server"):
        queue.poll_scores()


def begin(state: Admission, count: int, version: int = 0) -> tuple[Admission, list[Ticket]]:
    tickets = []
    for _ in range(count):
        state, ticket = state.start("w", version)
        tickets.append(ticket)
    check_admission(state)
    return state, tickets


def finish(state: Admission, tickets: list[Ticket], *versions: int) -> Admission:
    for ticket in tickets:
        state, counts = state.finished(ticket, versions)
        assert counts
    check_admission(state)
    return state


def keys(batch: tuple[AdmittedGroup, ...]) -> list[int]:
    return [group.ticket.key for group in batch]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_begins_as_many_groups_as_areal_allows(staleness: int) -> None:
    state = Admission(AdmissionLimits(batch=4, staleness=staleness))
    started = 0
    while state.may_start(0):
        assert started // 4 <= staleness
        state, _ = begin(state, 1)
        started += 1
    assert started // 4 == staleness + 1
    with pytest.raises(RolloutError, match="room for 0"):
        state.start("w", 0)


def test_without_staleness_it_is_synchronous_and_on_policy() -> None:
    state = Admission(AdmissionLimits(batch=3, staleness=0))
    for version in range(4):
        assert state.take()[1] == ()
        state, tickets = begin(state, 3, version)
        state = finish(state, tickets[::-1], version)
        state, batch = state.take()
        assert keys(batch) == [3 * version, 3 * version + 1, 3 * version + 2]
        assert {(g.oldest, g.newest) for g in batch} == {(version, version)}
        assert not state.may_start(version), "nothing may start with weights about to change"
        state = state.updated(version + 1)
        assert not state.may_start(version), "a worker with the old weights has to wait"


def test_an_interrupted_group_stays_as_old_as_its_oldest_token() -> None:
    state = Admission(AdmissionLimits(batch=1, staleness=1))
    state, [first, second] = begin(state, 2)
    state, batch = finish(state, [first], 0).take()
    state = state.updated(1)
    state, batch = finish(state, [second], 0, 1).take()
    assert [(g.oldest, g.newest) for g in batch] == [(0, 1)]


def test_the_trainer_waits_for_a_group_before_it_gets_too_old() -> None:
    state, [slow, *fast] = begin(Admission(AdmissionLimits(batch=2, staleness=1)), 4)
    state, _ = finish(state, fast, 0).take()
    state = state.updated(1)
    state, fast = begin(state, 2, version=1)
    state = finish(state, fast, 1)
    assert len(state.queue) == 3
    assert state.take()[1] == ()
    state, batch = finish(state, [slow], 0, 1).take()
    assert keys(batch) == [0, 3]
    check_admission(state.updated(2))


def test_a_worker_behind_begins_nothing_that_can_t_be_consumed_in_time() -> None:
    state = Admission(AdmissionLimits(batch=1, staleness=1))
    state, [first] = begin(state, 1)
    state, _ = finish(state, [first], 0).take()
    state = state.updated(1)
    state, _ = begin(state, 1, version=0)
    assert state.capacity == 1
    assert not state.may_start(0)
    assert state.may_start(1)


def test_a_dead_worker_s_prompts_are_sampled_again_and_its_late_answer_is_ignored() -> None:
    state = Admission(AdmissionLimits(batch=2, staleness=0))
    state, kept = state.start("alive", 0)
    state, old = state.start("dead", 0)
    state, lost = state.lost("dead")
    check_admission(state)
    assert (lost, state.reissued, state.resample) == ((old,), 1, (1,))
    assert state.lost("dead")[1] == ()
    state, new = state.start("alive", 0)
    assert (new.key, new.attempt) == (old.key, 2)
    state, counts = state.finished(old, {0})
    assert not counts
    state = finish(state, [new, kept], 0)
    state, counts = state.finished(new, {0})
    assert not counts, "a second answer of the same attempt"
    assert state.late == 2
    assert keys(state.take()[1]) == [0, 1]


def test_reject_concerns_one_group_for_good() -> None:
    state, [a, b, c] = begin(Admission(AdmissionLimits(batch=3, staleness=0)), 3)
    state = state.reject(b)
    check_admission(state)
    assert (state.resample, list(state.in_flight), state.rejected, state.capacity) == (
        (),
        [0, 2],
        1,
        1,
    )
    assert state.reject(b).late == 1
    state, [new] = begin(state, 1)
    assert new.key == 3
    assert keys(finish(state, [a, c, new], 0).take()[1]) == [0, 2, 3]


def test_nothing_is_begun_that_the_run_s_last_update_can_t_consume() -> None:
    state = Admission(AdmissionLimits(batch=2, staleness=3, steps=2))
    state, tickets = begin(state, 4)
    assert state.capacity == 0
    assert state.reject(tickets[0]).capacity == 1


def test_what_breaks_the_protocol_is_refused() -> None:
    state, [ticket] = begin(Admission(AdmissionLimits(batch=1, staleness=0)), 1)
    with pytest.raises(RolloutError, match="trainer is at 0"):
        state.may_start(1)
    with pytest.raises(RolloutError, match="trainer is at 0"):
        state.finished(ticket, {0, 1})
    with pytest.raises(RolloutError, match="version of each token"):
        state.finished(ticket, ())
    with pytest.raises(RolloutError, match="version of each token"):
        state.finished(ticket, {-1, 0})
    with pytest.raises(RolloutError, match="without a batch"):
        state.updated(1)
    state, _ = finish(state, [ticket], 0).take()
    with pytest.raises(RolloutError, match="isn't done"):
        state.take()
    with pytest.raises(RolloutError, match="can't follow"):
        state.updated(2)


def test_check_sees_what_is_broken() -> None:
    state, _ = begin(Admission(AdmissionLimits(batch=2, staleness=0)), 2)
    lost = Admission(state.limits, drawn=3, in_flight=state.in_flight)
    doubled = Admission(state.limits, drawn=2, in_flight=state.in_flight, resample=(0,))
    old = Admission(state.limits, version=1, consumed=2, drawn=4, in_flight=state.in_flight)
    for broken, message in ((lost, "lost"), (doubled, "two places"), (old, "too old")):
        with pytest.raises(RolloutError, match=message):
            check_admission(broken)


WORKERS = ("a", "b", "c")


class AnyOrderOfEvents(RuleBasedStateMachine):
    """A second record of all prompts, tickets and token versions, kept by the test itself."""

    @initialize(
        batch=st.integers(1, 3),
        staleness=st.integers(0, 3),
    )
    def setup(self, batch: int, staleness: int) -> None:
        self.state = Admission(AdmissionLimits(batch, staleness))
        self.weights = dict.fromkeys(WORKERS, 0)
        self.tickets: list[Ticket] = []  # all ever given out
        self.live: dict[Ticket, tuple[str, set[int]]] = {}  # who samples it, versions of its tokens
        self.queued: dict[int, set[int]] = {}
        self.finished_at: Counter[int] = Counter()  # consumed or rejected keys

    @rule(worker=st.sampled_from(WORKERS), behind=st.none() | st.integers(0, 4))
    def start(self, worker: str, behind: int | None = None) -> None:
        """A prompt, or what an earlier run had begun of it so many versions ago."""
        version = self.weights[worker]
        oldest = None if behind is None else max(0, version - behind)
        if not self.state.may_start(version, oldest):
            return
        self.state, ticket = self.state.start(worker, version, oldest)
        assert ticket.attempt not in {old.attempt for old in self.tickets}
        assert ticket.key not in {old.key for old in self.live} | set(self.queued)
        assert not self.finished_at[ticket.key]
        self.tickets.append(ticket)
        self.live[ticket] = (worker, {version} if oldest is None else {oldest, version})

    @rule(worker=st.sampled_from(WORKERS), resumes=st.booleans())
    def sync(self, worker: str, resumes: bool) -> None:
        self.weights[worker] = self.state.version
        for who, versions in self.live.values():
            if who == worker and resumes:
                versions.add(self.state.version)

    @rule(pick=st.integers(0))
    def answer(self, pick: int) -> None:
        """Of any attempt: one under way, one given up, or one that has answered before."""
        if not self.tickets:
            return
        ticket = self.tickets[pick % len(self.tickets)]
        current = self.live.pop(ticket, None)
        versions = current[1] if current else {0}
        self.state, counts = self.state.finished(ticket, versions)
        assert counts == (current is not None)
        if current:
            self.queued[ticket.key] = versions

    @rule(worker=st.sampled_from(WORKERS))
    def die(self, worker: str) -> None:
        self.state, lost = self.state.lost(worker)
        assert set(lost) == {ticket for ticket, (who, _) in self.live.items() if who == worker}
        for ticket in lost:
            del self.live[ticket]
        self.weights[worker] = self.state.version

    @rule(pick=st.integers(0))
    def reject(self, pick: int) -> None:
        if not self.tickets:
            return
        ticket = self.tickets[pick % len(self.tickets)]
        self.state = self.state.reject(ticket)
        if self.live.pop(ticket, None):
            self.finished_at[ticket.key] += 1

    @rule()
    def take(self) -> None:
        if self.state.training:
            return
        version, limits = self.state.version, self.state.limits
        self.state, batch = self.state.take()
        assert len(batch) in (0, limits.batch)
        for key in [group.ticket.key for group in batch]:
            assert version - min(self.queued.pop(key)) <= limits.staleness
            self.finished_at[key] += 1

    @rule()
    def update(self) -> None:
        if not self.state.training:
            return
        self.state = self.state.updated(self.state.version + 1)

    @invariant()
    def holds(self) -> None:
        state, limits = self.state, self.state.limits
        check_admission(state)
        assert set(state.in_flight) == {ticket.key for ticket in self.live}
        assert {group.ticket.key for group in state.queue} == set(self.queued)
        places = len(state.in_flight) + len(state.queue)
        assert places <= (limits.staleness + 1) * limits.batch
        assert not self.finished_at or max(self.finished_at.values()) == 1
        here = {*state.resample, *state.in_flight, *self.queued, *self.finished_at}
        assert here == set(range(state.drawn))

    def teardown(self) -> None:
        """From wherever it got, the trainer gets its next batches if one worker lives."""
        if not hasattr(self, "state"):
            return
        for _ in range(4):
            before = self.state.version
            self.update()
            for worker in WORKERS[1:]:
                self.die(worker)
            self.sync(WORKERS[0], resumes=True)
            while self.state.may_start(self.state.version):
                self.start(WORKERS[0])
            for ticket in list(self.live):
                self.answer(self.tickets.index(ticket))
            self.take()
            assert self.state.training, self.state
            self.update()
            assert self.state.version > before
            self.holds()


AnyOrderOfEvents.TestCase.settings = settings(stateful_step_count=50, deadline=None)


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase


class Simulation:
    """Workers of random speeds that die and come back, weights that arrive late, one trainer."""

    def __init__(self, limits: AdmissionLimits, seed: int, deaths: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.state, self.deaths = Admission(limits), deaths
        self.now, self.count = 0.0, count(1)
        self.events: list[tuple[float, int, str, Any]] = [(0.0, 0, "train", None)]
        self.weights = {f"w{i}": 0 for i in range(self.random.randint(1, 4))}
        self.speed = {name: self.random.uniform(0.5, 4.0) for name in self.weights}
        self.slots = {name: self.random.randint(1, 3) for name in self.weights}
        self.down: set[str] = set()
        self.versions: dict[Ticket, set[int]] = {}
        self.consumed: list[AdmittedGroup] = []

    def at(self, delay: float, what: str, who: Any) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.count), what, who))

    def run(self, updates: int, limit: float) -> float:
        """Simulated seconds until `updates` updates are done; fails past `limit`."""
        while self.state.version < updates:
            assert self.events, "nothing will ever happen again"
            self.now, _, what, who = heapq.heappop(self.events)
            assert self.now < limit, f"update {self.state.version} after {self.now} s"
            getattr(self, what)(who)
            self.fill()
            check_admission(self.state)
        return self.now

    def fill(self) -> None:
        for name in sorted(self.weights.keys() - self.down):
            busy = sum(g.worker == name for g in self.state.in_flight.values())
            while busy < self.slots[name] and self.state.may_start(self.weights[name]):
                self.state, ticket = self.state.start(name, self.weights[name])
                self.versions[ticket] = {self.weights[name]}
                self.at(self.random.lognormvariate(0, 1.2) / self.speed[name], "answer", ticket)
                busy += 1
                if self.random.random() < self.deaths:
                    self.at(self.random.random(), "die", name)

    def answer(self, ticket: Ticket) -> None:
        self.state, _ = self.state.finished(ticket, self.versions[ticket])
        if not self.state.training:
            self.train(None)

    def die(self, name: str) -> None:
        if name not in self.down:
            self.down.add(name)
            self.state, _ = self.state.lost(name)
            self.at(self.random.uniform(0.1, 5.0), "come_back", name)

    def come_back(self, name: str) -> None:
        self.down.discard(name)
        self.sync(name)

    def sync(self, name: str) -> None:
        self.weights[name] = self.state.version
        for group in list(self.state.in_flight.values()):
            if group.worker == name:
                self.versions[group.ticket].add(self.state.version)

    def train(self, _none: None) -> None:
        if self.state.training:
            return
        version = self.state.version
        self.state, batch = self.state.take()
        for group in batch:
            assert version - min(self.versions[group.ticket]) <= self.state.limits.staleness
        self.consumed += batch
        if batch:
            self.at(self.random.uniform(0.2, 2.0), "update", None)

    def update(self, _none: None) -> None:
        self.state = self.state.updated(self.state.version + 1)
        for name in self.weights:
            self.at(self.random.uniform(0.0, 1.0), "sync", name)
        self.train(None)


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 4),
    staleness=st.integers(0, 3),
    deaths=st.sampled_from([0.0, 0.1, 0.3]),
)
def test_the_trainer_always_gets_its_next_batch(
    seed: int, batch: int, staleness: int, deaths: float
) -> None:
    run = Simulation(AdmissionLimits(batch, staleness, steps=12), seed, deaths)
    run.run(12, limit=5_000)
    state, consumed = run.state, [group.ticket.key for group in run.consumed]
    assert len(consumed) == len(set(consumed)) == 12 * batch
    assert sorted(consumed) == list(range(12 * batch)), "all prompts begun, and no other"
    assert [*state.in_flight, *state.queue, *state.resample] == [], "nothing is left at the end"
    if staleness == 0:
        assert consumed == list(range(12 * batch))
        assert [(g.oldest, g.newest) for g in run.consumed] == [
            (v, v) for v in range(12) for _ in range(batch)
        ]


def test_asynchronous_rollout_takes_less_time_than_synchronous() -> None:
    def time(staleness: int) -> float:
        return sum(Simulation(AdmissionLimits(4, staleness), s).run(30, 10_000) for s in range(5))

    assert time(1) < 0.85 * time(0)
