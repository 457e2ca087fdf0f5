"""Asynchronous rollout: workers that never wait for the trainer, and the queue between them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from torch.distributed import PrefixStore, TCPStore

from engine.batch import Batch, Future
from engine.controller import supervision
from engine.controller.groups import Roles
from engine.controller.rollout_queue import AdmissionLimits, RolloutQueue
from engine.controller.timeline import Span
from engine.errors import EngineError, PlacementError, WeightSyncError, WorkerError
from engine.rollout.stream import Begun
from engine.weight_transfer import Backend, BroadcastRound, end_round

if TYPE_CHECKING:
    from engine.controller.groups import ActorGroup, StreamRolloutGroup
    from engine.workers.rollout_worker import Draws, PollResult


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """One version of the weights: in full, and as a delta against the version before."""

    version: int
    full: Future[Batch] | None = None  # None: they are broadcast
    delta: Future[Batch] | None = None  # against version `base`
    base: int = -1
    broadcasts: WeightBroadcasts | None = None

    def update_from(self, version: int) -> Future[Batch]:
        """The update for a process with weights of `version` (-1: none)."""
        assert self.full is not None
        return self.delta if self.delta is not None and version == self.base else self.full


class ApartSampling:
    """Prompts that workers with one version of the weights sample while their streams wait."""

    def __init__(self, prompts: Batch, draws: Draws, version: int, workers: int) -> None:
        """`prompts` have a `group_ids` of their own each."""
        self.draws, self.version, self._prompts = draws, version, prompts
        self._rows = {key: row for row, key in enumerate(prompts["group_ids"].tolist())}
        self._left = deque(self._rows)  # keys of what no worker has
        self._share = -(-len(self._rows) // workers)
        self._given: dict[str, set[int]] = {}  # keys by worker, until they are finished
        self._groups: dict[int, Batch] = {}  # by key

    def give(self, worker: str) -> Batch | None:
        """What an idle worker samples next, if anything."""
        if self._given.get(worker) or not self._left:
            return None
        keys = [self._left.popleft() for _ in range(min(self._share, len(self._left)))]
        self._given[worker] = set(keys)
        return self._prompts.rows([self._rows[key] for key in keys])

    def finish(self, worker: str, groups: Iterable[Batch]) -> None:
        for group in groups:
            key = int(group["group_ids"][0])
            if key in self._given.get(worker, ()):  # else it is of prompts that were given up
                self._given[worker].remove(key)
                self._groups[key] = group

    def lost(self, worker: str) -> None:
        """Let another worker sample what this one has not finished."""
        self._left.extend(sorted(self._given.pop(worker, ())))

    def result(self) -> Batch | None:
        """All groups in the order of their prompts, once they are there."""
        if len(self._groups) < len(self._rows):
            return None
        return Batch.concat([self._groups[key] for key in self._rows])


class WeightPublisher:
    """Publishes an actor's weights, with `deltas` also as a delta against the version before."""

    def __init__(self, actor: ActorGroup, *, deltas: bool) -> None:
        self._actor, self._deltas = actor, deltas
        self._base: int | None = None

    def publish(self, version: int) -> PublishedWeights:
        base, self._base = self._base, version
        full = self._actor.weights()
        if base is None or not self._deltas:
            return PublishedWeights(version, full)
        return PublishedWeights(version, full, self._actor.weights_delta(), base)


log = logging.getLogger(__name__)
_FAILED_ROUNDS = 3  # in a row, until weights go through the store


class WeightBroadcasts(WeightPublisher):
    """Rounds in which the actor broadcasts its weights to the workers that lack them.

    The trainer's thread begins them, while its actor has nothing else to do. When `_FAILED_ROUNDS`
    in a row have failed, weights are published as by the base.
    """

    def __init__(
        self,
        actor: ActorGroup,
        backend: Backend,
        host: str,
        *,
        ranks: int,
        deadline_s: float,
        wait_s: float,
    ) -> None:
        """Serve their store at `host`, this machine's address.

        `ranks`: vLLM's processes of a worker. A worker that keeps others waiting has `deadline_s`,
        and the actor, which may have a step to finish first, `wait_s`.
        """
        super().__init__(actor, deltas=False)
        self._store = TCPStore(host, 0, None, True, wait_for_workers=False)
        self._last = BroadcastRound(host, self._store.port, 0, 0, (), 0, backend, -1, deadline_s)
        self._ranks, self._wait_s = ranks, wait_s
        self._members: dict[str, int] = {}  # attempts of the workers in the group
        self._sending: Future[None] | None = None
        self._failed = 0  # rounds in a row
        self.rounds: dict[str, BroadcastRound] = {}  # by worker, until it has loaded the weights
        self.begun: set[str] = set()  # workers that receive, or have received

    @property
    def sent(self) -> bool:
        """Whether all workers of the round have received the weights."""
        return self._sending is None

    @property
    def idle(self) -> bool:
        return self.sent and not self.rounds

    def publish(self, version: int) -> PublishedWeights:
        if self._failed < _FAILED_ROUNDS:
            return PublishedWeights(version, broadcasts=self)
        if self._failed == _FAILED_ROUNDS:
            log.warning("weights go through Ray's store from now on: broadcasts failed")
            self._failed += 1  # said once
        return super().publish(version)

    def begin(self, members: dict[str, int], version: int) -> None:
        """Begin a round for these attempts of workers, in a new group where they are others."""
        members, number = dict(sorted(members.items())), self._last.number + 1
        self._last = sent = replace(
            self._last,
            number=number,
            group=self._last.group if members == self._members else number,
            names=tuple(name for name in members for _ in range(self._ranks)),
            version=version,
        )
        self._members, self.begun = members, set()
        self.rounds = {
            name: replace(sent, rank=1 + at * self._ranks, deadline_s=self._wait_s)
            for at, name in enumerate(members)
        }
        self._sending = self._actor.broadcast_weights(sent)

    def poll(self) -> str | None:
        """Why the round has failed, if it has since the last call; raise what the actor raised."""
        if self._sending is None or not self._sending.done():
            return None
        sending, self._sending = self._sending, None
        try:
            sending.result()
        except WeightSyncError as error:
            self.rounds, self._members = {}, {}
            self._failed += 1
            return str(error)
        self._failed = 0
        return None

    def lost(self, worker: str, cause: str) -> None:
        """End the round if it waits for this worker."""
        if self.rounds.pop(worker, None) is not None and not self.sent:
            end_round(PrefixStore(f"round{self._last.number}", self._store), cause)

    def end(self, cause: str) -> None:
        """End the round, and the group: later workers are other processes."""
        for worker in list(self.rounds):
            self.lost(worker, cause)
        self._members, self._sending = {}, None


@dataclass(slots=True)
class RolloutProcess:
    attempt: int
    roles: Roles
    group: StreamRolloutGroup
    call: Future[int | PollResult | None] | None = None  # in flight
    loads: Future[Batch] | None = None  # what the call loads, if it is load_weights
    sync: bool = False  # there are newer weights to load
    needs_full_weights: bool = False  # a delta failed
    busy: int = 0  # completions that it decodes or has queued
    full: bool = False  # its engine has no room for what is queued
    idle_until: float = 0.0


class RolloutProcesses:
    """At most one running process a worker; each that has started is closed in the end."""

    def __init__(self, spawn: Callable[[str, int], Roles], workers: int) -> None:
        self._spawn = spawn
        self._starting: dict[tuple[str, int], futures.Future[Roles]] = {}
        self._starters = futures.ThreadPoolExecutor(2 * workers, "rollout-start")
        self._closing: list[futures.Future[None]] = []
        self._closers = futures.ThreadPoolExecutor(2 * workers, "rollout-close")
        self.running: dict[str, RolloutProcess] = {}

    @property
    def any_left(self) -> bool:
        return bool(self.running or self._starting)

    def start(self, name: str, attempt: int) -> None:
        self._starting[name, attempt] = self._starters.submit(self._spawn, name, attempt)

    def poll_started(self) -> Iterator[tuple[str, int, Roles | BaseException]]:
        """Processes that have started since the last call, or the error of each that failed."""
        for name, attempt in [key for key, starting in self._starting.items() if starting.done()]:
            starting = self._starting.pop((name, attempt))
            yield name, attempt, starting.exception() or starting.result()

    def accept(self, name: str, attempt: int, roles: Roles) -> None:
        self.running[name] = RolloutProcess(attempt, roles, cast("StreamRolloutGroup", roles[name]))

    def close_unused(self, roles: Roles) -> None:
        """Close the roles of a process that is not needed any more, without waiting."""
        self._closing.append(self._closers.submit(roles.close))

    def kill(self, name: str) -> None:
        if (process := self.running.pop(name, None)) is not None:
            self.close_unused(process.roles)

    def close(self, timeout_s: float) -> None:
        """Close all processes. What takes longer goes on: those that are still starting, too."""
        for starting in self._starting.values():
            starting.add_done_callback(_close_late)
        for name in list(self.running):
            self.kill(name)
        self._starters.shutdown(wait=False, cancel_futures=True)
        closed, _ = futures.wait(self._closing, timeout=timeout_s)
        for error in filter(None, (closing.exception() for closing in closed)):
            log.warning("a rollout worker's process was not closed: %s", error)
        self._closers.shutdown(wait=False)


def _close_late(starting: futures.Future[Roles]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()


_SLICE_S = 0.25  # how long a worker decodes before it reports
_IDLE_S = 0.25  # how often an idle worker is checked to be alive
_PAUSE_S = 0.005  # of the event loop when nothing happened
_REPORT_S = 5.0  # how long workers may take to report their unfinished groups


class AsyncRollout:
    """Keeps `names` workers decoding, until `close`.

    `spawn(name, attempt)` starts a worker's process and returns roles with one role of that name
    that has `poll` and `load_weights`; `next_prompt()` gives the next prompt, a batch of one row;
    `score(groups)` starts scoring the rows of finished groups; `keep(group)` says whether it may be
    learned from (None: always). The first three are called from the event loop's thread. `finished`
    are groups that an earlier rollout's `paused` gave.
    """

    def __init__(
        self,
        names: Sequence[str],
        limits: AdmissionLimits,
        health: supervision.HealthPolicy,
        *,
        spawn: Callable[[str, int], Roles],
        next_prompt: Callable[[], Batch],
        score: Callable[[Batch], Future[Batch]],
        weights: PublishedWeights,
        keep: Callable[[Batch], bool] | None = None,
        finished: Sequence[tuple[Batch, Batch]] = (),
        timeout_s: float = 1800.0,
    ) -> None:
        self._timeout_s, self._weights = timeout_s, weights
        version = weights.version
        self._new_queue = partial(RolloutQueue, next_prompt=next_prompt, score=score, keep=keep)
        self.queue = self._new_queue(limits, version, finished=finished)
        self._apart: ApartSampling | None = None
        self.fleet = supervision.Fleet.start(
            names, time.monotonic(), health, limits.staleness, version
        )
        self.restarts = self.resyncs = 0  # resyncs: deltas that failed, so full weights were sent
        self.causes: list[str] = []  # of workers' deaths
        self._reporting: set[str] = set()  # workers that have to report their unfinished groups
        self._reported: dict[int, Begun] = {}  # by key
        self._processes = RolloutProcesses(spawn, len(names))
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="async-rollout", daemon=True)
        for name in names:
            self._processes.start(name, 0)
        self._thread.start()

    def take(self) -> tuple[Batch, Batch]:
        """The next prompts and their completions in whole groups, scored, oldest first; waits.

        Raises what stopped the rollout, or WorkerError when nothing comes within the deadline.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while True:
                self._broadcast()
                if self._error is not None:
                    raise self._error
                if (batch := self.queue.take()) is not None:
                    return batch
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    admission = self.queue.admission
                    raise self._late(
                        "rollout gave no batch",
                        f"{len(admission.in_flight)} groups in flight, {len(admission.queue)} "
                        "queued",
                    )

    def sample(self, prompts: Batch, draws: Draws) -> Batch:
        """Sample prompts, all under the newest weights, before anything that is queued; waits.

        Workers that load them, or start, are waited for, and what a lost one had is sampled by
        another. Raises what stopped the rollout, WorkerError after the deadline.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            version, workers = self._weights.version, len(self.fleet.workers)
            apart = self._apart = ApartSampling(prompts, draws, version, workers)
            try:
                while (batch := apart.result()) is None:
                    self._broadcast()
                    if self._error is not None:
                        raise self._error
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        what = f"{draws} completions of policy version {version} were not sampled"
                        raise self._late(what, f"{len(prompts)} prompts")
            finally:
                self._apart = None
        return batch

    def _late(self, what: str, work: str) -> WorkerError:
        workers = self.fleet.workers.values()
        states = ", ".join(f"{w.name} {w.state} with version {w.version}" for w in workers)
        causes = f"; {'; '.join(self.causes[-3:])}" if self.causes else ""
        return WorkerError(
            f"{what} within {self._timeout_s:g} s ({states}; {work}{causes}); look at its "
            "workers, or raise trainer.step_timeout_s"
        )

    def begin(self, limits: AdmissionLimits, finished: Sequence[tuple[Batch, Batch]]) -> None:
        """Begin with other limits and `finished` groups, where nothing has been sampled yet."""
        with self._changed:
            self.queue = self._new_queue(limits, self._weights.version, finished=finished)

    def update_weights(self, weights: PublishedWeights) -> None:
        """Have workers load new weights between two decode steps."""
        with self._changed:
            self._weights = weights
            self.queue.admission = self.queue.admission.updated(weights.version)
            self._act(*self.fleet.updated(weights.version, time.monotonic()))
            self._broadcast()

    def metrics(self) -> dict[str, float]:
        """Totals since the start, and the groups in flight and queued."""
        with self._changed:
            queue, admission = self.queue, self.queue.admission
            totals = {
                "completions": queue.completions,
                "generated_tokens": queue.tokens,
                "in_flight": len(admission.in_flight),
                "queued": len(admission.queue),
                "reissued": admission.reissued,
                "rejected": admission.rejected,
                "restarts": self.restarts,
                "resyncs": self.resyncs,
            }
        return {f"async/{name}": float(value) for name, value in totals.items()}

    @contextmanager
    def paused(self) -> Iterator[tuple[list[tuple[Batch, Batch]], list[Batch]]]:
        """As `RolloutQueue.unused`, with what workers report first; nothing finishes meanwhile."""
        with self._changed:
            self._request_reports()
            yield self.queue.unused(self._reported)

    def take_spans(self) -> list[Span]:
        """Spans of the workers since the last call; a dead or hanging worker has none."""
        with self._changed:
            processes = list(self._processes.running.values())
        spans: list[Span] = []
        for process in processes:
            with contextlib.suppress(WorkerError):
                spans += process.roles.timeline()
        return spans

    def close(self) -> None:
        with self._changed:
            if self._closing:
                return
            self._closing = True
            if self._weights.broadcasts is not None:
                self._weights.broadcasts.end("the rollout has ended")
        self._thread.join(timeout=30)
        self._processes.close(timeout_s=30)

    def _broadcast(self) -> None:
        """Begin a round for the workers that wait for weights; of the trainer's thread."""
        broadcasts, version = self._weights.broadcasts, self._weights.version
        if broadcasts is None or not broadcasts.idle:
            return
        self._weights = broadcasts.publish(version)
        if self._weights.broadcasts is None:
            return
        processes = self._processes.running.items()
        if due := {name: process.attempt for name, process in processes if process.sync}:
            broadcasts.begin(due, version)

    def _request_reports(self) -> None:
        """Have workers report their unfinished groups; the lock is released meanwhile."""
        self._reported = {}
        self._reporting = {group.worker for group in self.queue.admission.in_flight.values()}
        deadline = time.monotonic() + _REPORT_S
        while self._reporting and self._error is None and self._thread.is_alive():
            if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                log.warning(
                    "%s did not report unfinished groups within %g s; a run that resumes from this "
                    "checkpoint samples them again", ", ".join(sorted(self._reporting)), _REPORT_S,
                )  # fmt: skip
                break
        self._reporting = set()

    def _run(self) -> None:
        try:
            while not self._closing:
                with self._changed:
                    progress = self._run_once(time.monotonic())
                    if progress:
                        self._changed.notify_all()
                if not progress:
                    time.sleep(_PAUSE_S)
        except BaseException as error:  # raised in the trainer's thread
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _run_once(self, now: float) -> bool:
        progress = self._poll_started(now)
        broadcasts = self._weights.broadcasts
        if broadcasts is not None and (cause := broadcasts.poll()) is not None:
            log.warning("a broadcast of weights failed: %s", cause)
            progress = True
        for name, process in list(self._processes.running.items()):
            if process.call is not None and process.call.done():
                self._handle_result(name, process, now)
                progress = True
        progress |= self.queue.poll_scores()
        self._act(*self.fleet.tick(now))
        for name, process in list(self._processes.running.items()):
            if process.call is None:
                progress |= self._call(name, process, now)
        return progress

    def _poll_started(self, now: float) -> bool:
        progress = False
        for name, attempt, started in self._processes.poll_started():
            progress = True
            if isinstance(started, PlacementError) and not self._processes.any_left:
                # A further try would find no more room, unless all that the run holds is closed.
                raise WorkerError(str(started)) if attempt else started
            if isinstance(started, BaseException):
                self._event(name, attempt, supervision.Died(f"it did not start: {started}"), now)
            elif self.fleet.workers[name].attempt != attempt:
                self._processes.close_unused(started)  # it was replaced meanwhile
            else:
                self._processes.accept(name, attempt, started)
                self._event(name, attempt, supervision.Started(), now)
        return progress

    def _call(self, name: str, process: RolloutProcess, now: float) -> bool:
        if process.sync and self._sync(name, process):
            return True
        if name not in self.fleet.serving:
            if process.sync and now >= process.idle_until:  # it waits for the trainer
                process.call = process.group.poll(None, 0.0, name in self._reporting)
            return process.call is not None
        if self._apart is not None and self._apart.version == self.fleet.workers[name].version:
            prompts = self._apart.give(name)
            if prompts is not None:
                process.busy = len(prompts)
                process.call = process.group.begin_apart(prompts, self._apart.draws)
                return True
        # Its share of the room, so that the others get theirs; none where its engine has none.
        none = process.full or self._apart is not None
        room = 0 if none else max(self.queue.admission.capacity, 0)
        share = -(-room // len(self.fleet.workers))
        fresh = self.queue.begin(name, self.fleet.workers[name].version, share)
        idle = not fresh and not process.busy and now < process.idle_until
        if idle and name not in self._reporting:
            return False
        prompts = Batch.concat(fresh) if fresh else None
        process.call = process.group.poll(prompts, _SLICE_S, name in self._reporting)
        return True

    def _sync(self, name: str, process: RolloutProcess) -> bool:
        """Have a worker load newer weights, or receive them; whether there is anything to do."""
        broadcasts = self._weights.broadcasts
        if broadcasts is None:
            process.sync = False
            has = -1 if process.needs_full_weights else self.fleet.workers[name].version
            process.loads = self._weights.update_from(has)
            process.call = process.group.load_weights(process.loads)
        elif (broadcast := broadcasts.rounds.get(name)) is None:
            return False
        elif name not in broadcasts.begun:
            broadcasts.begun.add(name)
            process.call = process.group.receive_weights(broadcast)
        elif broadcasts.sent:
            del broadcasts.rounds[name]
            process.sync = False
            process.call = process.group.load_received(broadcast.version)
        return process.call is not None

    def _handle_result(self, name: str, process: RolloutProcess, now: float) -> None:
        (call, process.call), (loads, process.loads) = (process.call, None), (process.loads, None)
        assert call is not None
        try:
            result = call.result()
        except EngineError as error:
            outdated = isinstance(error, WeightSyncError)
            if outdated and loads is not None and not process.needs_full_weights:
                log.warning("rollout worker %s gets the full weights: %s", name, error)
                self.resyncs += 1
                process.needs_full_weights = process.sync = True
                return
            if not outdated and loads is not None and (failure := loads.failure()) is not None:
                raise failure from None  # the trainer's own, which no other rollout worker mends
            self._event(name, process.attempt, supervision.Died(str(error)), now)
            return
        self._event(name, process.attempt, supervision.Heartbeat(), now)
        if isinstance(result, int):  # the version of weights that it loaded
            process.needs_full_weights = False
            self._event(name, process.attempt, supervision.Synced(result), now)
            return
        if result is None:  # `begin_apart`, `receive_weights`
            return
        if self._apart is not None:
            self._apart.finish(name, result.apart)
        if result.partial_groups is not None:
            self._reported |= result.partial_groups
            self._report_done(name)
        process.busy, process.full = result.busy, result.full
        process.idle_until = now + _IDLE_S
        self.queue.finish(name, result.groups)

    def _report_done(self, name: str) -> None:
        """A worker has reported its unfinished groups, or never will."""
        self._reporting.discard(name)
        self._changed.notify_all()

    def _event(self, name: str, attempt: int, event: supervision.Event, now: float) -> None:
        if isinstance(event, supervision.Died):
            self._report_done(name)
        self._act(*self.fleet.handle(name, attempt, event, now))

    def _act(self, fleet: supervision.Fleet, actions: Sequence[supervision.Action]) -> None:
        self.fleet = fleet
        for action in actions:
            match action:
                case supervision.SyncWeights(worker):
                    self._processes.running[worker].sync = True
                case supervision.Kill(worker, _):
                    cause = fleet.workers[worker].deaths[-1].cause
                    log.warning("rollout worker given up: %s", cause)
                    self.causes.append(cause)
                    self._report_done(worker)
                    if self._weights.broadcasts is not None:
                        self._weights.broadcasts.lost(worker, cause.partition("\n")[0])
                    if self._apart is not None:
                        self._apart.lost(worker)
                    self._processes.kill(worker)
                    self.queue.worker_lost(worker)
                case supervision.Replace(worker, attempt):
                    self.restarts += 1
                    self._processes.start(worker, attempt)
                case supervision.Stop(cause):
                    raise WorkerError(cause)
