"""The processes of asynchronous rollout: started and closed in threads, so that nobody waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass

from engine.controller.groups import Roles, WorkerGroup
from engine.controller.timeline import Span
from engine.errors import WorkerError
from engine.futures import Future


@dataclass(slots=True)
class Process:
    """One process of a worker, and what it is doing."""

    attempt: int
    roles: Roles
    group: WorkerGroup
    call: Future | None = None  # under way
    loads: int | None = None  # version that the call loads, if it does
    sync: int | None = None  # version to load next
    needs_whole: bool = False  # weights: it could not take over a delta
    busy: int = 0  # completions it decodes or has queued
    idle_until: float = 0.0


class Processes:
    """At most one process a worker is running; others may be coming up or going away."""

    def __init__(self, spawn: Callable[[str, int], Roles], workers: int) -> None:
        self._spawn = spawn
        self._starting: dict[tuple[str, int], futures.Future[Roles]] = {}
        self._threads = futures.ThreadPoolExecutor(2 * workers, "rollout-start")
        self.running: dict[str, Process] = {}

    def start(self, name: str, attempt: int) -> None:
        """Begin to bring a process up; `arrivals` says when it is there."""
        self._starting[name, attempt] = self._threads.submit(self._spawn, name, attempt)

    def arrivals(self) -> Iterator[tuple[str, int, Roles | BaseException]]:
        """What has come up since the last time, or why it did not."""
        for name, attempt in [key for key, starting in self._starting.items() if starting.done()]:
            starting = self._starting.pop((name, attempt))
            yield name, attempt, starting.exception() or starting.result()

    def accept(self, name: str, attempt: int, roles: Roles) -> None:
        """Let an arrival be the worker's process."""
        self.running[name] = Process(attempt, roles, getattr(roles, name))

    def dismiss(self, roles: Roles) -> None:
        """Close roles that nobody wants, without waiting for it."""
        self._threads.submit(roles.close)

    def kill(self, name: str) -> None:
        """Close a worker's process, if it runs, without waiting for it."""
        process = self.running.pop(name, None)
        if process is not None:
            self.dismiss(process.roles)

    def close(self, timeout_s: float) -> None:
        """Close all processes, those that still come up as well."""
        for starting in self._starting.values():
            starting.add_done_callback(_close_late)
        closing = [self._threads.submit(p.roles.close) for p in self.running.values()]
        futures.wait(closing, timeout=timeout_s)
        self._threads.shutdown(wait=False, cancel_futures=True)


def spans_of(processes: list[Process]) -> list[Span]:
    """The timelines of processes since the last time; one that is dead or hangs has none."""
    spans: list[Span] = []
    for process in processes:
        with contextlib.suppress(WorkerError):
            spans += process.roles.timeline()
    return spans


def _close_late(starting: futures.Future[Roles]) -> None:
    """Close a process that came up when nobody wanted it any more."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()
