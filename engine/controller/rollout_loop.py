"""The event loop of asynchronous rollout: calls on workers, their answers, and who begins what.

What may be begun and consumed is `staleness`' to say, who is healthy `health`'s; here is what they
ask for: calls, processes, clocks. What the trainer sees of it is `async_rollout`'s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import Batch
from engine.controller.health import Fleet, HealthPolicy
from engine.controller.health_events import (
    Action,
    Died,
    Event,
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
from engine.controller.roles import Roles
from engine.controller.rollout_processes import RolloutProcess, RolloutProcesses
from engine.controller.staleness import Admission, Limits, Ticket
from engine.controller.weight_publisher import PublishedWeights
from engine.errors import EngineError, WeightSyncError, WorkerError
from engine.futures import Future
from engine.rollout.partial_groups import PartialGroup, take_partial_groups, with_partial_groups

log = logging.getLogger(__name__)

_SLICE_S = 0.25  # how long a worker decodes before it reports
_IDLE_S = 0.25  # how often a worker without work is asked for a sign of life
_TURN_S = 0.005  # pause of the event loop when nothing happened


@dataclass
class Counts:
    """Totals since the start."""

    groups: int = 0  # finished
    completions: int = 0
    tokens: int = 0
    restarts: int = 0
    resyncs: int = 0  # deltas of the weights that failed, so that the whole was sent
    causes: list[str] = field(default_factory=list)


class RolloutLoop:
    """Turns in a thread of its own; everything in it runs there, or under the lock `_changed`."""

    def __init__(
        self,
        names: Sequence[str],
        limits: Limits,
        health: HealthPolicy,
        *,
        spawn: Callable[[str, int], Roles],
        next_prompt: Callable[[], Batch],
        score: Callable[[Batch], Future[Batch]],
        weights: PublishedWeights,
        keep: Callable[[Batch], bool] | None = None,
        finished: Sequence[tuple[Batch, Batch]] = (),
        timeout_s: float = 1800.0,
    ) -> None:
        self._next_prompt, self._score, self._keep = next_prompt, score, keep
        self._timeout_s = timeout_s
        version = weights.version
        consumed = version * limits.batch
        self.admission = Admission(limits, version=version, consumed=consumed, begun=consumed)
        self.fleet = Fleet.start(names, time.monotonic(), health, limits.staleness, version)
        self.counts = Counts()
        self._weights = weights
        self._prompts: dict[int, Batch] = {}  # by key, until consumed
        self._scoring: dict[Ticket, tuple[Batch, Future[Batch]]] = {}
        self._scored: dict[int, Batch] = {}
        self._again: deque[Batch] = deque()  # prompts that come before all others
        self._asked: set[str] = set()  # workers that are to say what they have begun
        self._begun: dict[int, PartialGroup] = {}  # what they said, by key
        for prompt, group in finished:
            self._put(prompt, group)
        self._processes = RolloutProcesses(spawn, len(names))
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="async-rollout", daemon=True)
        for name in names:
            self._processes.start(name, 0)
        self._thread.start()

    def _put(self, prompt: Batch, group: Batch) -> None:
        """Take on a finished group, under a key of this rollout."""
        versions = set(group["token_versions"][group["response_mask"].bool()].tolist())
        self.admission, key = self.admission.restored(versions)
        if key is None:
            self._again.append(prompt)
        else:
            own = {"group_ids": torch.full((len(group),), key)}
            self._prompts[key] = prompt | {"group_ids": torch.tensor([key])}
            self._scored[key] = group | own

    def _run(self) -> None:
        try:
            while not self._closing:
                with self._changed:
                    moved = self._turn(time.monotonic())
                    if moved:
                        self._changed.notify_all()
                if not moved:
                    time.sleep(_TURN_S)
        except BaseException as error:  # the trainer's thread is the one to raise it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _turn(self, now: float) -> bool:
        moved = self._poll_starts(now)
        for name, process in list(self._processes.running.items()):
            if process.call is not None and process.call.done():
                self._answer(name, process, now)
                moved = True
        moved |= self._poll_scores()
        self._act(*self.fleet.tick(now))
        for name, process in list(self._processes.running.items()):
            if process.call is None:
                moved |= self._call(name, process, now)
        return moved

    def _poll_starts(self, now: float) -> bool:
        moved = False
        for name, attempt, came in self._processes.poll_started():
            moved = True
            if isinstance(came, BaseException):
                self._event(name, attempt, Died(f"it did not start: {came}"), now)
            elif self.fleet.workers[name].attempt != attempt:
                self._processes.close_unused(came)  # it came up after it had been given up
            else:
                self._processes.accept(name, attempt, came)
                self._event(name, attempt, Replaced(), now)
                self._event(name, attempt, Started(), now)
        return moved

    def _call(self, name: str, process: RolloutProcess, now: float) -> bool:
        """Start a worker's next call, if there is one for it."""
        if process.sync is not None:
            process.loads, process.sync = process.sync, None
            has = -1 if process.needs_full_weights else self.fleet.workers[name].version
            process.call = process.group.load_weights(self._weights.update_from(has))
            return True
        if name not in self.fleet.serving:
            return False
        fresh = self._admit(name)
        if not fresh and not process.busy and name not in self._asked and now < process.idle_until:
            return False
        prompts = Batch.concat(fresh) if fresh else None
        process.call = process.group.poll(prompts, _SLICE_S, name in self._asked)
        return True

    def _admit(self, name: str) -> list[Batch]:
        """Prompts that this worker begins now: its share of the room, so that others get theirs."""
        version = self.fleet.workers[name].version
        share = -(-max(self.admission.room, 0) // max(1, len(self.fleet.serving)))
        fresh: list[Batch] = []
        while len(fresh) < share and self.admission.may_start(version):
            fresh.append(self._begin(name, version))
        return fresh

    def _begin(self, name: str, version: int) -> Batch:
        """Have a worker begin a prompt, or go on with what an earlier run had begun of it."""
        if self.admission.again:
            self.admission, ticket = self.admission.start(name, version)
            return with_partial_groups(self._prompts[ticket.key], [None])
        row = self._again.popleft() if self._again else self._next_prompt()
        prompt, [begun] = take_partial_groups(row)
        oldest = begun.oldest_version if begun is not None else None
        if not self.admission.may_start(version, oldest):
            begun = oldest = None  # too old when its turn comes
        self.admission, ticket = self.admission.start(name, version, oldest)
        self._prompts[ticket.key] = prompt | {"group_ids": torch.tensor([ticket.key])}
        return with_partial_groups(self._prompts[ticket.key], [begun])

    def _answer(self, name: str, process: RolloutProcess, now: float) -> None:
        """Take in what a call gave."""
        call, process.call = process.call, None
        assert call is not None
        loads, process.loads = process.loads, None
        try:
            result = call.result()
        except WeightSyncError as error:
            if loads is None or process.needs_full_weights:
                self._event(name, process.attempt, Died(str(error)), now)
                return
            log.warning("rollout worker %s gets the weights whole: %s", name, error)
            self.counts.resyncs += 1
            process.needs_full_weights, process.sync = True, loads
            return
        except EngineError as error:
            self._event(name, process.attempt, Died(str(error)), now)
            return
        self._event(name, process.attempt, Heartbeat(), now)
        if isinstance(result, int):  # the version of weights that it loaded
            process.needs_full_weights = False
            self._event(name, process.attempt, Synced(result), now)
            return
        if result.begun is not None:
            self._begun |= result.begun
            self._has_said(name)
        process.busy = result.busy
        process.idle_until = now + _IDLE_S
        for group in result.groups:
            self._finish(name, group)

    def _finish(self, name: str, group: Batch) -> None:
        """Send a finished group to be scored, if it is still waited for."""
        held = self.admission.in_flight.get(int(group["group_ids"][0]))
        if held is None or held.worker != name:
            return
        self.counts.groups += 1
        self.counts.completions += len(group)
        self.counts.tokens += int(group["response_mask"].sum())
        self._scoring[held.ticket] = (group, self._score(group))

    def _poll_scores(self) -> bool:
        done = [ticket for ticket, (_, score) in self._scoring.items() if score.done()]
        for ticket in done:
            group, score = self._scoring.pop(ticket)
            group = group | score.result()
            if self._keep is not None and not self._keep(group):
                self.admission = self.admission.reject(ticket)
                self._prompts.pop(ticket.key, None)
                continue
            inside = group["response_mask"].bool()
            versions = set(group["token_versions"][inside].tolist())
            self.admission, counts = self.admission.finished(ticket, versions)
            if counts:
                self._scored[ticket.key] = group
        return bool(done)

    def _has_said(self, name: str) -> None:
        """A worker has said what it has begun, or never will."""
        self._asked.discard(name)
        self._changed.notify_all()

    def _event(self, name: str, attempt: int, event: Event, now: float) -> None:
        if isinstance(event, Died):
            self._has_said(name)
        self._act(*self.fleet.handle(name, attempt, event, now))

    def _act(self, fleet: Fleet, actions: Sequence[Action]) -> None:
        """Do what the state machine asks for."""
        self.fleet = fleet
        for action in actions:
            match action:
                case SyncWeights(worker, _, version):
                    self._processes.running[worker].sync = version
                case Kill(worker, _):
                    cause = fleet.workers[worker].deaths[-1].cause
                    log.warning("rollout worker given up: %s", cause)
                    self.counts.causes.append(cause)
                    self._has_said(worker)
                    self._processes.kill(worker)
                case Reissue(worker, _):
                    self.admission, lost = self.admission.lost(worker)
                    for ticket in lost:
                        self._scoring.pop(ticket, None)
                case Replace(worker, attempt):
                    self.counts.restarts += 1
                    self._processes.start(worker, attempt)
                case Stop(cause):
                    raise WorkerError(cause)
