"""What calls cost: time and memory of each step, and the timeline, a span for every call.

Hosts record each call of a role, the controller its own arithmetic (`span`) and its waiting, where
`Placement.timeline` is set. Times are the wall clock's, as close across machines as their clocks
are; a span's length is measured with the monotonic clock.
"""

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.storage.filesystem import write_atomically

CONTROLLER = "controller"


@dataclass(frozen=True, slots=True)
class Span:
    name: str  # the method, e.g. "generate", or what the controller did, e.g. "advantages"
    role: str  # e.g. "rollout"; "controller" for the controller's own
    rank: int
    start_ns: int  # since 1970
    end_ns: int
    step: int  # the training step that it belongs to, e.g. 12
    pid: int
    process: str  # e.g. "actor+rollout/0"
    machine: str
    call: int = 0  # the call's number in the run; 0: not a call
    after: tuple[int, ...] = ()  # calls whose results it took in


class Recorder:
    """Keeps the spans of one process; safe to use from several threads."""

    def __init__(self, process: str) -> None:
        self.process, self.step = process, 0
        self._machine = socket.gethostname()
        self._spans: deque[Span] = deque()

    @contextmanager
    def span(
        self,
        name: str,
        role: str = CONTROLLER,
        rank: int = 0,
        step: int | None = None,
        call: int = 0,
        after: tuple[int, ...] = (),
    ) -> Iterator[None]:
        """Record the block, also where it raises; `step` defaults to the recorder's."""
        step = self.step if step is None else step
        start, ticks = time.time_ns(), time.perf_counter_ns()
        try:
            yield
        finally:
            end = start + time.perf_counter_ns() - ticks
            where = (os.getpid(), self.process, self._machine)
            self._spans.append(Span(name, role, rank, start, end, step, *where, call, after))

    def take(self) -> list[Span]:
        return [self._spans.popleft() for _ in range(len(self._spans))]


class CallCost(NamedTuple):
    seconds: float
    memory_gb: float  # GiB, the most that PyTorch has had on the process's GPU; 0 without one


class CallCosts:
    """The costs of a role's calls by method; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._costs: dict[str, CallCost] = {}

    def add(self, method: str, ranks: Sequence[CallCost]) -> None:
        """Add a call, by its slowest rank and the one with the most memory."""
        seconds, memory_gb = map(max, zip(*ranks, strict=True))
        with self._lock:
            before = self._costs.get(method, CallCost(0.0, 0.0))
            self._costs[method] = CallCost(
                before.seconds + seconds, max(before.memory_gb, memory_gb)
            )

    def take(self) -> dict[str, CallCost]:
        """The calls' since the last time."""
        with self._lock:
            costs, self._costs = self._costs, {}
        return costs


_active: list[Recorder] = []  # of the runs that this process controls: none or one, mostly


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let `span` record into `recorder` for the block."""
    _active.append(recorder)
    try:
        yield
    finally:
        _active.remove(recorder)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Record what the controller itself does in the block, such as `span("advantages")`."""
    thread = threading.current_thread()
    main = thread is threading.main_thread()
    role = CONTROLLER if main else f"{CONTROLLER} ({thread.name})"
    with ExitStack() as stack:
        for recorder in _active:
            stack.enter_context(recorder.span(name, role))
        yield


def write_trace(spans: Sequence[Span], path: str | Path) -> Path:
    """Write `spans` as a trace for https://ui.perfetto.dev or chrome://tracing, whole or not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [json.dumps(trace(spans)).encode()])
    return path


def trace(spans: Sequence[Span]) -> dict[str, object]:
    """The trace as JSON-ready values: a process a host, a line a role, arrows for data."""
    origin = min((s.start_ns for s in spans), default=0)
    rows = {host: i + 1 for i, host in enumerate(dict.fromkeys(map(_host, spans)))}
    lines = {line: i + 1 for i, line in enumerate(dict.fromkeys(s.role for s in spans))}
    events = [
        _name("process_name", f"{process} ({machine}, pid {pid})", row)
        for (process, machine, pid), row in rows.items()
    ]
    for host, role in dict.fromkeys((_host(s), s.role) for s in spans):
        events.append(_name("thread_name", role, rows[host], lines[role]))

    def at(s: Span, moment_ns: int) -> dict[str, object]:
        return {"pid": rows[_host(s)], "tid": lines[s.role], "ts": (moment_ns - origin) / 1e3}

    for s in spans:
        what = {"ph": "X", "name": f"{s.role}.{s.name}", "cat": "call" if s.call else CONTROLLER}
        known = {"step": s.step, "rank": s.rank, "pid": s.pid}
        length = {"dur": (s.end_ns - s.start_ns) / 1e3}
        events.append({**what, **length, **at(s, s.start_ns), "args": known})
    for producer, consumer in _arrows(spans):
        name = {"name": "data", "cat": "data", "id": f"{producer.call}-{consumer.call}"}
        # A moment before its end, so that the viewer finds the slice that the arrow leaves.
        leave = max(producer.start_ns, producer.end_ns - 1)
        events.append({**name, "ph": "s", **at(producer, leave)})
        events.append({**name, "ph": "f", "bp": "e", **at(consumer, consumer.start_ns)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin_ns": origin}}


def _host(span: Span) -> tuple[str, str, int]:
    return span.process, span.machine, span.pid


def _name(kind: str, name: str, row: int, line: int = 0) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": row, "tid": line, "args": {"name": name}}


def _arrows(spans: Sequence[Span]) -> list[tuple[Span, Span]]:
    """From each call to the calls that took its result in, between their first ranks."""
    first: dict[int, Span] = {}
    for s in sorted((s for s in spans if s.call), key=lambda s: s.rank):
        first.setdefault(s.call, s)
    return [(first[n], taker) for taker in first.values() for n in taker.after if n in first]
