"""Worker health in any order of events, and a simulated fleet that breaks and recovers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from invariants import check_admission, check_fleet

from engine.controller.rollout_queue import Admission, AdmissionLimits, AdmittedGroup, Ticket
from engine.controller.supervision import (
    Action,
    Died,
    Event,
    Fleet,
    HealthPolicy,
    HealthState,
    Heartbeat,
    Kill,
    Reissue,
    Replace,
    Replaced,
    Started,
    Synced,
    SyncWeights,
)

POLICY = HealthPolicy(
    suspect_after=5, dead_after=20, start_timeout=50, sync_timeout=30, max_restarts=3, window=100
)

# Most events let a worker live, or no run of events would get far.
EVENTS = st.sampled_from(
    [
        *(3 * [Started(), Synced(0), Heartbeat(), Replaced(), "tick", "updated"]),
        *(Synced(1), Synced(2)),  # versions behind the trainer's
        Died("x"),
    ]
)


@given(
    events=st.lists(
        st.tuples(EVENTS, st.sampled_from("abc"), st.sampled_from([0, 0, 0, -1]), st.floats(0, 6)),
        min_size=80,
        max_size=120,
    ),
    max_lag=st.integers(0, 2),
)
def test_invariants_hold_in_any_order_of_events(
    events: list[tuple[Any, str, int, float]], max_lag: int
) -> None:
    fleet, now, asked = Fleet.start("abc", 0.0, POLICY, max_lag, version=7), 0.0, Counter[Action]()
    for event, name, back, later in events:
        now += later
        before, attempt = fleet, fleet.workers[name].attempt + back
        if event == "tick":
            fleet, did = before.tick(now)
        elif event == "updated":
            fleet, did = before.updated(before.version + 1, now)
        elif isinstance(event, Synced):
            fleet, did = before.handle(name, attempt, Synced(before.version - event.version), now)
        else:
            fleet, did = before.handle(name, attempt, event, now)
        check_fleet(fleet)
        asked.update(did)
        assert not (before.stopped and did)
        for old, worker in zip(before.workers.values(), fleet.workers.values(), strict=True):
            died = (
                worker.state in (HealthState.DEAD, HealthState.FAILED)
                and old.state is not worker.state
            )
            ends = [a for a in did if isinstance(a, Kill | Reissue) and a.worker == old.name]
            who = old.name, old.attempt
            assert ends == ([Kill(*who), Reissue(*who)] if died else [])
            replaced = Replace(old.name, old.attempt + 1) in did
            assert replaced == (worker.attempt == old.attempt + 1) == (worker.attempt > old.attempt)
            moved = old.state, worker.state
            if moved == (HealthState.SERVING, HealthState.SYNCING):
                assert event == "updated"
            if worker.state is HealthState.SERVING and old.state is not HealthState.SERVING:
                assert old.state in (HealthState.SYNCING, HealthState.SUSPECT)
            if old.state is HealthState.SERVING and event == "updated":
                assert SyncWeights(*who, fleet.version) in did, "who serves gets the new weights"
    once = [a for a, times in asked.items() if not isinstance(a, SyncWeights) and times > 1]
    assert once == [], "asked for twice"


@dataclass
class Process:
    """One attempt of a worker in the simulated cluster."""

    up_at: float
    state: str = "starting"  # up, hung, gone
    version: int = -1
    syncs: list[tuple[float, int]] = field(default_factory=list)  # arrival, version
    groups: dict[Ticket, tuple[float, set[int]]] = field(default_factory=dict)  # end, versions
    wakes: float = float("inf")


class Cluster:
    """A fleet, its processes, the prompts and a trainer, in steps of half a second.

    Processes are killed (reported or not), hang, wake up too late and answer then, start slowly or
    never, until `calm`.
    """

    def __init__(self, seed: int, staleness: int, faults: float, calm: float) -> None:
        self.random, self.now, self.faults, self.calm = random.Random(seed), 0.0, faults, calm
        names = [f"w{i}" for i in range(self.random.randint(1, 4))]
        policy = replace(POLICY, max_restarts=6, sync_timeout=15)
        self.fleet = Fleet.start(names, 0.0, policy, max_lag=staleness)
        self.state = Admission(AdmissionLimits(batch=3, staleness=staleness, steps=10))
        self.processes = {(name, 0): self.spawn() for name in names}
        self.reissues: Counter[tuple[str, int]] = Counter()
        self.killed: list[tuple[float, tuple[str, int]]] = []
        self.consumed: list[AdmittedGroup] = []
        self.update_at = float("inf")

    def faulty(self, chance: float = 1.0) -> bool:
        return self.now < self.calm and self.random.random() < self.faults * chance

    def spawn(self) -> Process:
        slow = 1_000.0 if self.faulty(3) else 0.0
        return Process(up_at=self.now + self.random.uniform(0.5, 20.0) + slow)

    def tell(self, who: tuple[str, int], event: Event) -> None:
        self.fleet, actions = self.fleet.handle(*who, event, self.now)
        self.do(actions)

    def do(self, actions: tuple[Action, ...]) -> None:
        check_fleet(self.fleet)
        for action in actions:
            match action:
                case Kill(worker, attempt):
                    self.killed.append((self.now + self.random.uniform(0, 15), (worker, attempt)))
                case Reissue(worker, attempt):
                    self.reissues[worker, attempt] += 1
                    self.state, _ = self.state.lost(worker)
                case Replace(worker, attempt):
                    self.processes[worker, attempt] = self.spawn()
                    self.tell((worker, attempt), Replaced())
                case SyncWeights(worker, attempt, version):
                    arrival = self.now + self.random.uniform(0.5, 4.0)
                    self.processes[worker, attempt].syncs.append((arrival, version))

    def step(self) -> None:
        self.now += 0.5
        for at, who in self.killed:
            if self.now >= at:
                self.processes[who].state = "gone"
        for who, process in list(self.processes.items()):
            self.live(who, process)
        self.fleet, actions = self.fleet.tick(self.now)
        self.do(actions)
        self.give_prompts()
        self.train()
        check_admission(self.state)

    def live(self, who: tuple[str, int], process: Process) -> None:
        """What one process does and suffers in half a second."""
        if process.state == "up" and self.faulty():
            process.state = self.random.choice(["gone", "hung"])
            process.wakes = self.now + self.random.uniform(1, 35)
            if process.state == "gone" and self.random.random() < 0.5:
                self.tell(who, Died("signal 9"))
        if process.state == "hung" and self.now >= process.wakes:
            process.state = "up"
        if process.state == "starting" and self.now >= process.up_at:
            process.state = "up"
            self.tell(who, Started())
        if process.state != "up":
            return
        self.tell(who, Heartbeat())
        for arrival, version in [sync for sync in process.syncs if self.now >= sync[0]]:
            process.syncs.remove((arrival, version))
            process.version = max(process.version, version)
            self.tell(who, Synced(process.version))
            for _, versions in process.groups.values():
                versions.add(process.version)
        for ticket, (end, versions) in list(process.groups.items()):
            if self.now >= end:
                del process.groups[ticket]
                self.state, _ = self.state.finished(ticket, versions)

    def give_prompts(self) -> None:
        for name in self.fleet.serving:
            worker = self.fleet.workers[name]
            process = self.processes[name, worker.attempt]
            while len(process.groups) < 2 and self.state.may_start(worker.version):
                self.state, ticket = self.state.start(name, worker.version)
                assert process.version == worker.version, "the fleet knows what a worker has"
                end = self.now + self.random.lognormvariate(0.5, 1.0)
                process.groups[ticket] = (end, {process.version})

    def train(self) -> None:
        if self.now >= self.update_at:
            self.update_at = float("inf")
            self.state = self.state.updated(self.state.version + 1)
            self.fleet, actions = self.fleet.updated(self.state.version, self.now)
            self.do(actions)
        if not self.state.training:
            self.state, batch = self.state.take()
            self.consumed += batch
            if batch:
                self.update_at = self.now + self.random.uniform(0.5, 3.0)


@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 2),
    faults=st.sampled_from([0.0, 0.01, 0.04, 0.1]),
)
def test_a_supervised_run_loses_no_prompt_and_ends(
    seed: int, staleness: int, faults: float
) -> None:
    cluster = Cluster(seed, staleness, faults, calm=150.0)
    while cluster.state.version < 10 and not cluster.fleet.stopped:
        cluster.step()
        assert cluster.now < 2_000, f"neither done nor stopped: {cluster.fleet}"
    consumed = [group.ticket.key for group in cluster.consumed]
    assert len(consumed) == len(set(consumed))
    assert set(cluster.reissues.values()) <= {1}
    if cluster.fleet.stopped:
        assert faults > 0
        assert all(w.state is HealthState.FAILED for w in cluster.fleet.workers.values())
    else:
        assert sorted(consumed) == list(range(30))
    if faults == 0:
        assert not cluster.reissues


def test_the_simulated_runs_break_and_recover() -> None:
    """The property above would say little if hardly a run had a death or saw its end."""
    deaths, late, done = 0, 0, 0
    for seed in range(20):
        cluster = Cluster(seed, staleness=1, faults=0.1, calm=150.0)
        while cluster.state.version < 10 and not cluster.fleet.stopped:
            cluster.step()
        deaths += sum(cluster.reissues.values())
        late += cluster.state.late
        done += cluster.state.version == 10
    assert deaths > 40
    assert late > 5
    assert done > 10
