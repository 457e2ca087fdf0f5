"""The processes of asynchronous rollout, started and closed in background threads."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from engine.controller.roles import Roles
from engine.controller.timeline import Span
from engine.errors import WorkerError
from engine.futures import Future

if TYPE_CHECKING:
    from engine.batch import Batch
    from engine.controller.roles import StreamRolloutGroup
    from engine.workers.stream_rollout import PollResult

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RolloutProcess:
    """The running process of a rollout worker."""

    attempt: int
    roles: Roles
    group: StreamRolloutGroup
    call: Future[int | PollResult] | None = None  # in flight
    loads: Future[Batch] | None = None  # what the call loads, if it is load_weights
    sync: bool = False  # there are newer weights to load
    needs_full_weights: bool = False  # a delta failed
    busy: int = 0  # completions that it decodes or has queued
    full: bool = False  # its engine has no room for what is queued
    idle_until: float = 0.0


class RolloutProcesses:
    """At most one running process a worker; others may be starting or closing.

    Each process that has started is closed in the end, or its share of a Ray cluster stays taken.
    """

    def __init__(self, spawn: Callable[[str, int], Roles], workers: int) -> None:
        self._spawn = spawn
        self._starting: dict[tuple[str, int], futures.Future[Roles]] = {}
        self._starters = futures.ThreadPoolExecutor(2 * workers, "rollout-start")
        self._closing: list[futures.Future[None]] = []
        self._closers = futures.ThreadPoolExecutor(2 * workers, "rollout-close")
        self.running: dict[str, RolloutProcess] = {}

    @property
    def any_left(self) -> bool:
        """Whether a process runs or is starting."""
        return bool(self.running or self._starting)

    def start(self, name: str, attempt: int) -> None:
        """Start a process; `poll_started` tells when it is up."""
        self._starting[name, attempt] = self._starters.submit(self._spawn, name, attempt)

    def poll_started(self) -> Iterator[tuple[str, int, Roles | BaseException]]:
        """Processes that have started since the last call, or the error of each that failed."""
        for name, attempt in [key for key, starting in self._starting.items() if starting.done()]:
            starting = self._starting.pop((name, attempt))
            yield name, attempt, starting.exception() or starting.result()

    def accept(self, name: str, attempt: int, roles: Roles) -> None:
        """Make a started process the worker's."""
        self.running[name] = RolloutProcess(attempt, roles, cast("StreamRolloutGroup", roles[name]))

    def close_unused(self, roles: Roles) -> None:
        """Close the roles of a process that is not needed any more, without waiting."""
        self._closing.append(self._closers.submit(roles.close))

    def kill(self, name: str) -> None:
        """Close a worker's running process, if any, without waiting."""
        process = self.running.pop(name, None)
        if process is not None:
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


def spans_of(processes: list[RolloutProcess]) -> list[Span]:
    """Spans of all processes since the last call; a dead or hanging process has none."""
    spans: list[Span] = []
    for process in processes:
        with contextlib.suppress(WorkerError):
            spans += process.roles.timeline()
    return spans


def _close_late(starting: futures.Future[Roles]) -> None:
    """Close a process that started after the rollout was closed."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()
