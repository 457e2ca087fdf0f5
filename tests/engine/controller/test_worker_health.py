"""The health of workers, and properties of its transitions."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
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
    Replace,
    Started,
    Stop,
    Synced,
    SyncWeights,
)
from engine.errors import WorkerError

POLICY = HealthPolicy(
    suspect_after=5, dead_after=20, start_timeout=50, sync_timeout=30, max_restarts=2, window=100
)


class Drive:
    """A fleet, told events one after the other; `did` is what the last one asked for."""

    def __init__(self, *names: str, policy: HealthPolicy = POLICY, max_lag: int = 0) -> None:
        self.fleet = Fleet.start(names, now=0.0, policy=policy, max_lag=max_lag, version=7)
        self.did: tuple[Action, ...] = ()

    def on(self, name: str, event: Event, now: float, attempt: int | None = None) -> Drive:
        attempt = self.fleet.workers[name].attempt if attempt is None else attempt
        self.fleet, self.did = self.fleet.handle(name, attempt, event, now)
        check_fleet(self.fleet)
        return self

    def tick(self, now: float) -> Drive:
        self.fleet, self.did = self.fleet.tick(now)
        check_fleet(self.fleet)
        return self

    def updated(self, version: int, now: float) -> Drive:
        self.fleet, self.did = self.fleet.updated(version, now)
        check_fleet(self.fleet)
        return self

    def serve(self, name: str, now: float) -> Drive:
        """Bring a worker from STARTING to SERVING."""
        self.on(name, Started(), now).on(name, Synced(self.fleet.version), now)
        assert self.state(name) is HealthState.SERVING
        return self

    def state(self, name: str) -> HealthState:
        return self.fleet.workers[name].state


def test_a_worker_gets_the_current_weights_before_it_serves() -> None:
    drive = Drive("a")
    assert drive.fleet.serving == ()
    drive.on("a", Started(), 3)
    assert drive.did == (SyncWeights("a", 0, 7),)
    drive.updated(8, 4)
    assert (drive.did, drive.fleet.serving) == ((), ())
    drive.on("a", Synced(7), 5)
    assert drive.did == (SyncWeights("a", 0, 8),), "old by now"
    assert drive.state("a") is HealthState.SYNCING
    drive.on("a", Synced(8), 6)
    assert (drive.did, drive.fleet.serving) == ((), ("a",))


def test_a_killed_worker_is_reissued_at_once_and_replaced_after_the_back_off() -> None:
    drive = Drive("a", "b").serve("a", 1).serve("b", 1).updated(8, 2)
    drive.on("a", Synced(8), 2).on("b", Synced(8), 2)
    drive.on("a", Died("signal 9"), 3)
    assert drive.did == (Kill("a", 0),)
    assert drive.fleet.serving == ("b",)
    assert drive.on("a", Died("signal 9"), 3).did == (), "one death, one Kill"
    assert drive.tick(3.9).did == ()
    assert drive.tick(4).did == (Replace("a", 1),)
    assert drive.tick(5).did == ()
    assert drive.state("a") is HealthState.STARTING
    assert drive.on("a", Started(), 6).did == (SyncWeights("a", 1, 8),)
    assert drive.on("a", Synced(8), 7).fleet.serving == ("a", "b")


def test_a_hung_worker_is_suspected_then_replaced_and_its_late_signs_change_nothing() -> None:
    drive = Drive("a", "b").serve("a", 0).serve("b", 0)
    for now in (4, 8, 12, 16, 19):
        drive.on("b", Heartbeat(), now).tick(now)
    assert drive.state("a") is HealthState.SUSPECT
    assert (drive.did, drive.fleet.serving) == ((), ("b",))
    drive.tick(20)
    assert drive.did == (Kill("a", 0),)
    assert "no heartbeat for 20.0 s" in drive.fleet.workers["a"].deaths[0].cause
    drive.tick(21)
    before = drive.fleet
    late: tuple[Event, ...] = (Heartbeat(), Started(), Synced(7), Died("x"))
    for event in late:
        assert drive.on("a", event, 22, attempt=0).fleet == before
        assert drive.did == ()


def test_a_suspect_that_comes_back_serves_if_its_weights_are_new_enough() -> None:
    drive = Drive("a", max_lag=1).serve("a", 0).tick(5)
    assert drive.state("a") is HealthState.SUSPECT
    drive.updated(8, 6)
    assert drive.did == ()
    drive.on("a", Heartbeat(), 7)
    assert (drive.state("a"), drive.did) == (HealthState.SERVING, (SyncWeights("a", 0, 8),))
    assert drive.tick(11.9).state("a") is HealthState.SERVING
    drive.tick(12).updated(9, 12).on("a", Heartbeat(), 13)
    assert (drive.state("a"), drive.did) == (HealthState.SYNCING, (SyncWeights("a", 0, 9),))


def test_weights_that_reach_a_suspect_count() -> None:
    drive = Drive("a").serve("a", 0).tick(5).updated(8, 6).on("a", Synced(8), 6)
    assert drive.state("a") is HealthState.SUSPECT
    drive.on("a", Heartbeat(), 7)
    assert (drive.state("a"), drive.did) == (HealthState.SERVING, ())


def test_heartbeats_that_arrive_in_the_wrong_order_age_nobody() -> None:
    drive = Drive("a").serve("a", 0).on("a", Heartbeat(), 9).on("a", Heartbeat(), 3)
    assert drive.tick(13.9).state("a") is HealthState.SERVING


def test_a_crash_loop_backs_off_and_spends_its_budget_while_the_others_go_on() -> None:
    drive, now = Drive("a", "b").serve("b", 0), 0.0
    for attempt, pause in ((0, 1), (1, 2)):
        drive.on("a", Died("out of memory"), now)
        assert drive.did == (Kill("a", attempt),)
        assert drive.on("b", Heartbeat(), now).tick(now + pause - 0.1).did == ()
        now += pause
        assert drive.tick(now).did == (Replace("a", attempt + 1),)
    drive.on("a", Died("out of memory"), now)
    assert drive.did == (Kill("a", 2),)
    assert drive.state("a") is HealthState.FAILED
    assert drive.on("b", Heartbeat(), now).tick(now + 4).did == ()
    assert drive.fleet.serving == ("b",)
    assert drive.fleet.stopped is None


def test_the_back_off_is_bounded() -> None:
    policy = replace(POLICY, max_restarts=20, backoff=1, backoff_max=8)
    drive, now, pauses = Drive("a", policy=policy), 0.0, []
    for _ in range(6):
        drive.on("a", Died("x"), now)
        pauses.append(drive.fleet.workers["a"].deadline - now)
        now += pauses[-1]
        drive.tick(now)
    assert pauses == [1, 2, 4, 8, 8, 8]


def test_the_run_stops_with_the_first_cause_when_all_workers_failed() -> None:
    drive = Drive("a", "b", policy=replace(POLICY, max_restarts=0)).serve("a", 0).serve("b", 0)
    drive.on("b", Died("disk full"), 1)
    assert drive.fleet.stopped is None
    drive.on("a", Died("signal 9"), 2)
    stop = Stop("all 2 rollout workers failed; first cause: b: disk full")
    assert drive.did == (Kill("a", 0), stop)
    assert drive.fleet.stopped == stop
    assert drive.tick(1e6).did == ()
    assert drive.on("a", Died("again"), 1e6).did == ()


def test_a_slow_start_is_waited_for_up_to_its_deadline() -> None:
    drive = Drive("slow", "slower")
    drive.on("slow", Heartbeat(), 10).tick(49.9)
    assert (drive.state("slow"), drive.did) == (HealthState.STARTING, ())
    drive.serve("slow", 49.9).tick(50)
    assert drive.did == (Kill("slower", 0),)
    assert "still starting" in drive.fleet.workers["slower"].deaths[0].cause
    assert drive.on("slow", Heartbeat(), 50.5).tick(51).did == (Replace("slower", 1),)
    assert drive.on("slow", Heartbeat(), 99).tick(100.9).did == ()
    drive.on("slow", Heartbeat(), 101).tick(101)
    assert drive.did == (Kill("slower", 1),), "no process came"


def test_starts_that_never_end_in_service_spend_the_budget_however_slow_they_are() -> None:
    drive, now = Drive("a", policy=replace(POLICY, window=1)), 0.0
    while drive.fleet.stopped is None:
        now += 10
        drive.tick(now)
        assert now < 300
    assert "3" not in drive.fleet.stopped.cause
    assert drive.fleet.workers["a"].attempt == POLICY.max_restarts


def test_deaths_are_forgotten_after_service_outside_the_window() -> None:
    drive = Drive("a").serve("a", 0)
    for start in (0, 200, 400, 600):
        drive.on("a", Died("rare"), start + 50).tick(start + 51).serve("a", start + 60)
        assert len(drive.fleet.workers["a"].deaths) == 1
    drive.on("a", Died("soon after"), 690)
    assert len(drive.fleet.workers["a"].deaths) == 2


def test_weights_change_under_way_within_the_bound_and_pause_the_worker_beyond_it() -> None:
    drive = Drive("a", max_lag=1).serve("a", 0)
    drive.updated(8, 1)
    assert (drive.did, drive.fleet.serving) == ((SyncWeights("a", 0, 8),), ("a",))
    drive.updated(9, 2)
    assert (drive.did, drive.fleet.serving) == ((SyncWeights("a", 0, 9),), ())
    drive.on("a", Synced(8), 3)
    assert (drive.did, drive.fleet.serving) == ((SyncWeights("a", 0, 9),), ("a",))
    drive.on("a", Synced(9), 4).on("a", Synced(8), 4)
    assert drive.fleet.workers["a"].version == 9
    drive.updated(11, 5)
    assert drive.tick(34.9).did == ()
    assert drive.tick(35).did == (Kill("a", 0),), "the weights never arrived"


def test_weights_that_are_always_too_old_when_they_come_end_at_the_first_deadline() -> None:
    drive = Drive("a").on("a", Started(), 0)
    for second in range(1, 30):
        drive.updated(7 + second, second).on("a", Synced(6 + second), second).tick(second)
        assert drive.state("a") is HealthState.SYNCING
    assert drive.tick(30).did == (Kill("a", 0),)
    assert "still syncing at its deadline" in drive.fleet.workers["a"].deaths[0].cause


def test_an_update_is_no_sign_of_life() -> None:
    drive = Drive("a", max_lag=5).serve("a", 0).updated(8, 4).on("a", Synced(8), 4)
    assert drive.tick(5).state("a") is HealthState.SUSPECT


def test_what_breaks_the_protocol_is_refused() -> None:
    drive = Drive("a").on("a", Started(), 0)
    with pytest.raises(WorkerError, match="trainer is at 7"):
        drive.on("a", Synced(8), 1)
    with pytest.raises(WorkerError, match="version -1"):
        drive.on("a", Synced(-1), 1)
    with pytest.raises(WorkerError, match="no worker 'z'"):
        drive.fleet.handle("z", 0, Started(), 0)
    with pytest.raises(WorkerError, match="from 7 to 6"):
        drive.updated(6, 1)


def test_check_sees_what_is_broken() -> None:
    fleet = Drive("a").serve("a", 0).fleet
    worker = fleet.workers["a"]
    for broken in (
        replace(fleet, version=8),
        replace(fleet, workers={"a": replace(worker, version=-1)}, max_lag=99),
        replace(fleet, workers={"a": replace(worker, state=HealthState.FAILED)}),
        replace(fleet, stopped=Stop("no reason")),
    ):
        with pytest.raises(WorkerError):
            check_fleet(broken)


PATIENT = HealthPolicy(
    suspect_after=5, dead_after=20, start_timeout=50, sync_timeout=30, max_restarts=3, window=100
)


# Most events let a worker live, or no run of events would get far.
EVENTS = st.sampled_from(
    [
        *(3 * [Started(), Synced(0), Heartbeat(), "tick", "updated"]),
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
    fleet, now, asked = (
        Fleet.start("abc", 0.0, PATIENT, max_lag, version=7),
        0.0,
        Counter[Action](),
    )
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
            ends = [a for a in did if isinstance(a, Kill) and a.worker == old.name]
            who = old.name, old.attempt
            assert ends == ([Kill(*who)] if died else [])
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
        policy = replace(PATIENT, max_restarts=6, sync_timeout=15)
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
                    self.reissues[worker, attempt] += 1
                    self.state, _ = self.state.lost(worker)
                case Replace(worker, attempt):
                    self.processes[worker, attempt] = self.spawn()
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
