"""Supervision of rollout workers: their health, its events, and the actions that restore it.

A pure state machine: a `Fleet` is a value; an event gives the next value and the actions to take.
The caller has the processes, Ray and clocks; `now` is any monotonic clock in seconds. Which worker
has which prompt is in `rollout_queue`. The transitions out of each state, and their [actions]:

    STARTING    Started [SyncWeights] -> SYNCING
    SYNCING     Synced -> SERVING; version too old by now [SyncWeights], and no new deadline;
                Heartbeat, while it waits for the trainer's broadcast: a new deadline
    SERVING     silence -> SUSPECT; the trainer is too far ahead [SyncWeights] -> SYNCING
    SUSPECT     Heartbeat -> SERVING, or SYNCING if its weights are too old now [SyncWeights]
    DEAD        the back-off is over [Replace] -> STARTING
    FAILED      final

In any other state a worker dies [Kill] when its process ends or a call on it gives no
result (Died), when the state's deadline passes, and when it is silent for too long (hung, SIGSTOP).
It is then DEAD, or FAILED if its restart budget is spent. The fleet runs while one worker isn't
FAILED; after the last, [Stop] has the first cause.

Invariants, after every event (its tests check them):

1. A SERVING worker's weights are at most `max_lag` versions behind the trainer's.
2. `Fleet.serving` are the only workers that may be given a prompt.
3. Every death gives exactly one Kill, for the attempt that died.
4. Events of an earlier attempt (a late heartbeat or answer) change nothing.
5. No worker waits for ever: each state but FAILED ends by a deadline or by silence, and deaths
   without service in between always count. So a worker serves at last, or becomes FAILED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from engine.errors import WorkerError

# Events of a worker, which the caller reports.


@dataclass(frozen=True)
class Started:
    """The worker's process runs and answers."""


@dataclass(frozen=True)
class Synced:
    """The worker now has the weights of `version`."""

    version: int


@dataclass(frozen=True)
class Heartbeat:
    """The worker answers."""


@dataclass(frozen=True)
class Died:
    """The worker's process ended, failed to start, or gave no result for a call."""

    cause: str


Event = Started | Synced | Heartbeat | Died


@dataclass(frozen=True)
class ProcessAction:
    """An action on the process with the number `attempt` of a worker."""

    worker: str
    attempt: int


class Kill(ProcessAction):
    """End the process; sample its unfinished prompts elsewhere (`Admission.lost`)."""


class Replace(ProcessAction):
    """Start a new process, whose events have this `attempt`."""


@dataclass(frozen=True)
class SyncWeights(ProcessAction):
    """Send the trainer's weights. A worker with these or newer ones ignores them."""

    version: int


@dataclass(frozen=True)
class Stop:
    """End the run (for a trainer: its attempt) with this cause."""

    cause: str


Action = Kill | Replace | SyncWeights | Stop


class HealthState(StrEnum):
    STARTING = "starting"  # its process is created, and loads the model
    SYNCING = "syncing"  # it loads the trainer's weights; it gets no prompt yet
    SERVING = "serving"
    SUSPECT = "suspect"  # silent; it gets no new prompt and keeps those it has
    DEAD = "dead"  # waits for the end of its back-off
    FAILED = "failed"  # its restart budget is spent


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """Times in seconds; `suspect_after` is below `dead_after`."""

    suspect_after: float = 5.0  # silence that makes a worker SUSPECT
    dead_after: float = 20.0  # silence that makes it DEAD
    start_timeout: float = 300.0  # from Replace to Started
    sync_timeout: float = 120.0  # from SyncWeights, or a heartbeat, to Synced
    max_restarts: int = 3  # restarts within `window`; at the next death it is FAILED
    window: float = 600.0  # deaths longer ago are forgotten if the worker has served since
    backoff: float = 1.0  # before the first restart; doubles with each death in the window
    backoff_max: float = 60.0


@dataclass(frozen=True, slots=True)
class Death:
    at: float
    cause: str


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    name: str
    state: HealthState
    deadline: float  # end of STARTING, SYNCING; in DEAD, end of the back-off
    attempt: int = 0  # number of its process
    last_heartbeat: float = 0.0  # time of the last one, in SERVING and SUSPECT
    version: int = -1  # of its weights; -1: the trainer's weights were never sent
    served: bool = False  # whether this attempt has been SERVING
    deaths: tuple[Death, ...] = ()  # those that count against the restart budget


Transition = tuple[WorkerHealth, tuple[Action, ...]]


@dataclass(frozen=True, slots=True)
class Fleet:
    """All rollout workers; make one with `Fleet.start`."""

    policy: HealthPolicy
    max_lag: int  # versions a SERVING worker may be behind the trainer, e.g. 1
    version: int  # the trainer's
    workers: Mapping[str, WorkerHealth]
    stopped: Stop | None = None

    @classmethod
    def start(
        cls, names: Iterable[str], now: float, policy: HealthPolicy, max_lag: int, version: int = 0
    ) -> Self:
        """A fleet whose processes (attempt 0) have just been created."""
        deadline = now + policy.start_timeout
        workers = {name: WorkerHealth(name, HealthState.STARTING, deadline) for name in names}
        return cls(policy, max_lag, version, workers)

    @property
    def serving(self) -> tuple[str, ...]:
        return tuple(w.name for w in self.workers.values() if w.state is HealthState.SERVING)

    def handle(
        self, name: str, attempt: int, event: Event, now: float
    ) -> tuple[Fleet, tuple[Action, ...]]:
        """Apply an event of worker `name`, whose process has number `attempt`."""
        if name not in self.workers:
            raise WorkerError(f"no worker {name!r} in the fleet; there are {sorted(self.workers)}")
        worker = self.workers[name]
        if attempt != worker.attempt:
            return self, ()
        return self._change([worker], lambda w: self._react(w, event, now))

    def tick(self, now: float) -> tuple[Fleet, tuple[Action, ...]]:
        """Apply deadlines and silence. Handle the heartbeats that have arrived first."""
        return self._change(self.workers.values(), lambda w: self._expire(w, now))

    def updated(self, version: int, now: float) -> tuple[Fleet, tuple[Action, ...]]:
        """The trainer has weights of `version`: serving workers get them, too old ones pause."""
        if version < self.version:
            raise WorkerError(f"the trainer's version went back from {self.version} to {version}")
        fleet = replace(self, version=version)
        serving = [fleet.workers[name] for name in fleet.serving]
        return fleet._change(serving, lambda w: fleet._admit(w, w.last_heartbeat, now))

    def _react(self, worker: WorkerHealth, event: Event, now: float) -> Transition:
        """One event of the current process; one that doesn't apply changes nothing."""
        match event, worker.state:
            case _, HealthState.DEAD | HealthState.FAILED:
                pass
            case Died(cause), _:
                return self._die(worker, cause, now)
            case Started(), HealthState.STARTING:
                deadline = now + self.policy.sync_timeout
                worker = replace(worker, state=HealthState.SYNCING, deadline=deadline)
                return worker, self._sync(worker)
            case Synced(version), HealthState.SYNCING | HealthState.SERVING | HealthState.SUSPECT:
                if not 0 <= version <= self.version:
                    raise WorkerError(
                        f"worker {worker.name} reports weights of version {version}, but the "
                        f"trainer is at {self.version}; call updated() before weights are sent"
                    )
                worker = replace(worker, version=max(worker.version, version))
                if worker.state is HealthState.SYNCING:
                    return self._admit(worker, now, now)
            case Heartbeat(), HealthState.SYNCING:  # it waits for the trainer
                return replace(worker, deadline=now + self.policy.sync_timeout), ()
            case Heartbeat(), HealthState.SERVING:
                return replace(worker, last_heartbeat=max(worker.last_heartbeat, now)), ()
            case Heartbeat(), HealthState.SUSPECT:
                return self._admit(worker, now, now)
        return worker, ()

    def _expire(self, worker: WorkerHealth, now: float) -> Transition:
        silence, policy, late = now - worker.last_heartbeat, self.policy, now >= worker.deadline
        match worker.state:
            case HealthState.SERVING | HealthState.SUSPECT if silence >= policy.dead_after:
                return self._die(worker, f"hung: no heartbeat for {silence:.1f} s", now)
            case HealthState.SERVING if silence >= policy.suspect_after:
                return replace(worker, state=HealthState.SUSPECT), ()
            case HealthState.STARTING | HealthState.SYNCING if late:
                return self._die(worker, f"still {worker.state} at its deadline", now)
            case HealthState.DEAD if late:
                state, deadline = HealthState.STARTING, now + policy.start_timeout
                attempt, deaths = worker.attempt + 1, worker.deaths
                new = WorkerHealth(worker.name, state, deadline, attempt=attempt, deaths=deaths)
                return new, (Replace(worker.name, attempt),)
        return worker, ()

    def _admit(self, worker: WorkerHealth, last_heartbeat: float, now: float) -> Transition:
        """Let it serve if its weights are new enough; sync newer ones if there are any."""
        if self.version - worker.version <= self.max_lag:
            worker = replace(
                worker, state=HealthState.SERVING, last_heartbeat=last_heartbeat, served=True
            )
        elif worker.state is not HealthState.SYNCING:  # a running sync keeps its deadline
            deadline = now + self.policy.sync_timeout
            worker = replace(worker, state=HealthState.SYNCING, deadline=deadline)
        return worker, self._sync(worker) if worker.version < self.version else ()

    def _sync(self, worker: WorkerHealth) -> tuple[Action, ...]:
        return (SyncWeights(worker.name, worker.attempt, self.version),)

    def _die(self, worker: WorkerHealth, cause: str, now: float) -> Transition:
        policy, deaths = self.policy, worker.deaths
        if worker.served:
            deaths = tuple(death for death in deaths if now - death.at < policy.window)
        pause = min(policy.backoff * 2.0 ** min(len(deaths), 60), policy.backoff_max)
        worker = replace(
            worker,
            state=HealthState.FAILED if len(deaths) >= policy.max_restarts else HealthState.DEAD,
            deadline=now + pause,
            deaths=(*deaths, Death(now, f"{worker.name}: {cause}")),
        )
        return worker, (Kill(worker.name, worker.attempt),)

    def _change(
        self, workers: Iterable[WorkerHealth], step: Callable[[WorkerHealth], Transition]
    ) -> tuple[Fleet, tuple[Action, ...]]:
        """Apply `step` to each of `workers`; stop when the last worker has failed."""
        if self.stopped:
            return self, ()
        steps = [step(worker) for worker in workers]
        after = {**self.workers, **{worker.name: worker for worker, _ in steps}}
        actions = tuple(action for _, emitted in steps for action in emitted)
        if any(worker.state is not HealthState.FAILED for worker in after.values()):
            return replace(self, workers=after), actions
        first = min((d for w in after.values() for d in w.deaths), key=lambda death: death.at)
        stop = Stop(f"all {len(after)} rollout workers failed; first cause: {first.cause}")
        return replace(self, workers=after, stopped=stop), (*actions, stop)
