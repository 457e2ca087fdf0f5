"""Worker groups in this process: one thread a host, no copies, no serialisation.

Roles of one host run one call after the other, in the order of the calls; those of different hosts
(pools) run concurrently, as they do on Ray. No call waits for a later one, so threads can't
deadlock. A role must draw random numbers from generators of its own: all threads share the global
ones.
"""

import atexit
import ctypes
import logging
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch

from engine.batch import Batch, Future
from engine.console import INTERRUPTED, TERMINATED, end_process
from engine.controller.groups import WorkerGroup, seconds_left, timeout_error
from engine.controller.timeline import Recorder, Span, span
from engine.controller.worker_host import RemoteCall, RoleSpec, WorkerHost, merge_results
from engine.errors import WorkerError

log = logging.getLogger(__name__)
T = TypeVar("T")

_SOFT_PAUSE = 1  # omp_pause_soft: threads end, settings stay
# Of closed hosts, their last call not ended then; and the status of a process after an error, or 0.
_left_behind: dict[threading.Thread, int] = {}


class LocalHost:
    """A host whose calls run in a thread of its own.

    The roles are built by the caller's thread, where libraries may still set signal handlers.
    """

    def __init__(self, host: WorkerHost) -> None:
        torch.get_num_threads()  # from now on the caller's count is its own, whatever roles set
        self.host = host
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open = True
        self._refuses = False  # calls that have not begun
        # A daemon, so that a call that hangs for good can't keep the interpreter from ending.
        self._thread = threading.Thread(target=self._run_tasks, name=host.name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> futures.Future[T]:
        """Run `work` after all earlier work."""
        if not self._open:
            raise WorkerError(f"{self.host.name} is closed; call its roles before")
        end_openmp_team()
        done: futures.Future[T] = futures.Future()
        self._tasks.put(partial(self._run, work, done))
        return done

    def begin_close(self) -> futures.Future[None] | None:
        """Have the roles closed once earlier calls are done; None where they have been before."""
        if not self._open:
            return None
        closing = self.submit(self.host.close)
        self._open = False
        self._tasks.put(None)
        return closing

    def end_close(self, closing: futures.Future[None]) -> None:
        """Wait for the thread, or leave it behind; raise what closing the roles has raised."""
        if not closing.done():
            status = _status_after(sys.exc_info()[1])
            level = logging.INFO if status in (INTERRUPTED, TERMINATED) else logging.WARNING
            log.log(level, "%s: closed during a call; its thread ends with it", self.host.name)
            self._refuses = True
            _left_behind[self._thread] = status
            return
        closing.result()
        self._thread.join()

    def _run_tasks(self) -> None:
        self.host.use_threads()
        while (task := self._tasks.get()) is not None:
            task()
            del task  # or the last batch would stay until the next call

    def _run(self, work: Callable[[], T], done: futures.Future[T]) -> None:
        try:
            if self._refuses and work != self.host.close:
                raise WorkerError(f"{self.host.name} is closed")
            done.set_result(work())
        except BaseException as error:  # whatever it is, it belongs to who waits for it
            done.set_exception(error)


def close_hosts(hosts: Sequence[LocalHost], grace_s: float = 3.0) -> None:
    """Close the roles of all hosts once earlier calls are done.

    A host whose calls take longer than `grace_s` is left behind: its thread ends with its call.
    """
    begun = [(host, host.begin_close()) for host in hosts]
    closing = [(host, future) for host, future in begun if future is not None]
    futures.wait([future for _, future in closing], grace_s)
    with ExitStack() as stack:  # each of them, even where another's close raises
        for host, future in closing:
            stack.callback(host.end_close, future)


def threads_left_behind() -> list[str]:
    """Names of closed hosts whose last call still runs, with its memory and its threads."""
    return [thread.name for thread in _left_behind if thread.is_alive()]


def _status_after(error: BaseException | None) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    code = error.code if isinstance(error, SystemExit) else int(error is not None)
    return TERMINATED if code == signal.SIGTERM else code if isinstance(code, int) else 1


@atexit.register
def _exit_without_calls() -> None:
    """After an error end the process here: a call that returns to a dying interpreter aborts it."""
    running = (status for thread, status in _left_behind.items() if thread.is_alive())
    if status := next(running, None):
        atexit.unregister(_exit_without_calls)
        end_process(status)


def end_openmp_team() -> None:
    """End the OpenMP threads that wait for the calling thread's next computation.

    OpenMP counts them against the cores. With the threads of a host there are more than cores, and
    it then puts each thread to sleep between two operations: small ones take twice as long.
    """
    for library in _openmp():
        library.omp_pause_resource_all(_SOFT_PAUSE)


@cache
def _openmp() -> list[ctypes.CDLL]:
    folder = Path(torch.__file__).parent / "lib"
    libraries = [ctypes.CDLL(str(path)) for path in sorted(folder.glob("libgomp*.so*"))]
    return [library for library in libraries if hasattr(library, "omp_pause_resource_all")]


class LocalFuture(Future[object]):
    """One call on the ranks of a role; `parts[i]` is rank i's."""

    def __init__(
        self,
        call: RemoteCall,
        parts: Sequence[futures.Future[object]],
        collecting: Sequence[bool],
        timeout_s: float,
    ) -> None:
        self.number = call.number
        self._rank_label = f"{call.role} rank {{}}: {call.method}"
        self._span_name = f"wait for {call.role}.{call.method}"
        self._parts, self._collecting = list(parts), list(collecting)
        self._timeout_s = timeout_s
        self._values: list[object] = []  # one, once it is there

    def result(self, until: float | None = None) -> object:
        """Wait for all ranks; raise WorkerError, or the EngineError of a rank."""
        if self._values:
            return self._values[0]
        with span(self._span_name):
            return self.value(until)

    def done(self) -> bool:
        """Whether all ranks are done, or one has failed."""
        return all(p.done() for p in self._parts) or self.failure() is not None

    def failure(self) -> BaseException | None:
        return next((e for p in self._parts if p.done() and (e := p.exception())), None)

    def value(self, until: float | None = None) -> object:
        """As `result`, without a line in the controller's timeline."""
        if not self._values:
            first, limit = futures.FIRST_EXCEPTION, seconds_left(self._timeout_s, until)
            done, not_done = futures.wait(self._parts, limit, return_when=first)
            if not any(part.exception() for part in done) and not_done:
                rank = next(r for r, part in enumerate(self._parts) if part in not_done)
                raise timeout_error(self._rank_label.format(rank), self._timeout_s)
            results = [part.result() for part in self._parts if part in done]
            collected = [r for r, gives in zip(results, self._collecting, strict=True) if gives]
            self._values = [merge_results(collected)]
        return self._values[0]


class LocalGroup(WorkerGroup):
    def __init__(
        self,
        spec: RoleSpec,
        hosts: Sequence[LocalHost],
        timeout_s: float = 1800.0,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(spec, len(hosts), recorder)
        self._hosts, self._timeout_s = hosts, timeout_s

    def _references(self, piece: Batch | Future[object]) -> Sequence[object]:
        return [piece]

    def _submit(
        self,
        call: RemoteCall,
        data: Sequence[object],
        collecting: list[bool],
        sources: Sequence[Future[object]],
    ) -> LocalFuture:
        def work(host: WorkerHost) -> object:
            result, cost = host.measured_call(call, *map(_value, data))
            if host.rank == 0:  # the only one that `launch` places in a process
                self.call_costs.add(call.method, [cost])
            return result

        hosts = self._hosts[: len(collecting)]
        parts = [host.submit(partial(work, host.host)) for host in hosts]
        return LocalFuture(call, parts, collecting, self._timeout_s)


def _value(piece: object) -> object:
    if isinstance(piece, LocalFuture):
        return piece.value()
    return piece.result() if isinstance(piece, Future) else piece


def take_spans(hosts: Sequence[LocalHost], timeout_s: float) -> list[Span]:
    """The spans of all hosts, once the calls in flight are done."""
    parts = [host.submit(host.host.spans) for host in hosts]
    spans: list[Span] = []
    for host, part in zip(hosts, parts, strict=True):
        if futures.wait([part], timeout_s).not_done:
            raise timeout_error(f"{host.host.name}: its timeline", timeout_s)
        spans += part.result()
    return spans
