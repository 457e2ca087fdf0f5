"""Asynchronous admission in any order of events, and on a simulated clock."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from invariants import check_admission

from engine.controller.rollout_queue import Admission, AdmissionLimits, AdmittedGroup, Ticket

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
