"""Worker health: scenarios by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from invariants import check_fleet

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
        """From STARTING or REPLACING to SERVING."""
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
    assert drive.did == (Kill("a", 0), Reissue("a", 0))
    assert drive.fleet.serving == ("b",)
    assert drive.on("a", Died("signal 9"), 3).did == (), "one death, one reissue"
    assert drive.tick(3.9).did == ()
    assert drive.tick(4).did == (Replace("a", 1),)
    assert drive.tick(5).did == ()
    drive.on("a", Replaced(), 5)
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
    assert drive.did == (Kill("a", 0), Reissue("a", 0))
    assert "no heartbeat for 20.0 s" in drive.fleet.workers["a"].deaths[0].cause
    drive.tick(21)
    before = drive.fleet
    late: tuple[Event, ...] = (Heartbeat(), Started(), Synced(7), Died("x"), Replaced())
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
        assert drive.did == (Kill("a", attempt), Reissue("a", attempt))
        assert drive.on("b", Heartbeat(), now).tick(now + pause - 0.1).did == ()
        now += pause
        assert drive.tick(now).did == (Replace("a", attempt + 1),)
    drive.on("a", Died("out of memory"), now)
    assert drive.did == (Kill("a", 2), Reissue("a", 2))
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
    assert drive.did == (Kill("a", 0), Reissue("a", 0), stop)
    assert drive.fleet.stopped == stop
    assert drive.tick(1e6).did == ()
    assert drive.on("a", Died("again"), 1e6).did == ()


def test_a_slow_start_is_waited_for_up_to_its_deadline() -> None:
    drive = Drive("slow", "slower")
    drive.on("slow", Heartbeat(), 10).tick(49.9)
    assert (drive.state("slow"), drive.did) == (HealthState.STARTING, ())
    drive.serve("slow", 49.9).tick(50)
    assert drive.did == (Kill("slower", 0), Reissue("slower", 0))
    assert "still starting" in drive.fleet.workers["slower"].deaths[0].cause
    assert drive.on("slow", Heartbeat(), 50.5).tick(51).did == (Replace("slower", 1),)
    assert drive.on("slow", Heartbeat(), 99).tick(100.9).did == ()
    drive.on("slow", Heartbeat(), 101).tick(101)
    assert drive.did == (Kill("slower", 1), Reissue("slower", 1)), "no process came"


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
    assert drive.tick(35).did == (Kill("a", 0), Reissue("a", 0)), "the weights never arrived"


def test_weights_that_are_always_too_old_when_they_come_end_at_the_first_deadline() -> None:
    drive = Drive("a").on("a", Started(), 0)
    for second in range(1, 30):
        drive.updated(7 + second, second).on("a", Synced(6 + second), second).tick(second)
        assert drive.state("a") is HealthState.SYNCING
    assert drive.tick(30).did == (Kill("a", 0), Reissue("a", 0))
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
