"""Worker groups in this process: one thread a host, no copies, no serialisation.

Roles of one host run one call after the other, in the order of the calls; those of different
hosts (pools) run side by side, as they do on Ray. No call waits for a later one, so threads can't
lock each other up. A role must draw random numbers from generators of its own: the global ones
are shared by all threads.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from engine.batch import Batch
from engine.controller.groups import WorkerGroup
from engine.controller.row_sharding import join
from engine.controller.timeline import Recorder, Span, span
from engine.controller.worker_host import Call, Host, RoleSpec
from engine.errors import WorkerError
from engine.futures import Future, late

log = logging.getLogger(__name__)
Work = tuple[Callable[[], Any], "futures.Future[Any]"]


class LocalHost:
    """A host whose calls run in a thread of its own. The roles are built by the caller's thread,
    where libraries may still set signal handlers."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._open = True
        # A daemon, so that a call that hangs for good can't keep the interpreter from ending.
        self._thread = threading.Thread(target=self._serve, name=host.name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> futures.Future[Any]:
        """Run `work` after all earlier work."""
        if not self._open:
            raise WorkerError(f"{self.host.name} is closed; call its roles before")
        done: futures.Future[Any] = futures.Future()
        self._work.put((work, done))
        return done

    def close(self, grace_s: float = 10.0) -> None:
        """Close the roles once earlier calls are done; leave a call that takes longer behind."""
        if not self._open:
            return
        closing = self.submit(self.host.close)
        self._open = False
        self._work.put(None)
        if futures.wait([closing], grace_s).not_done:
            log.warning("%s: a call has not ended in %g s; left behind", self.host.name, grace_s)
        else:
            closing.result()
            self._thread.join()

    def _serve(self) -> None:
        import torch

        torch.set_num_threads(self.host.threads)  # OpenMP counts threads by calling thread
        while (item := self._work.get()) is not None:
            work, done = item
            try:
                done.set_result(work())
            except BaseException as error:  # whatever it is, it belongs to who waits for it
                done.set_exception(error)
            del item, work, done  # or the last batch would stay until the next call


class LocalFuture:
    """One call on the ranks of a role; `parts[i]` is rank i's."""

    def __init__(
        self,
        call: Call,
        parts: Sequence[futures.Future[Any]],
        collecting: Sequence[bool],
        timeout_s: float,
    ) -> None:
        self.number = call.number
        self.gives: frozenset[str] = frozenset()
        self._what = f"{call.role} rank {{}}: {call.method}"
        self._name = f"wait for {call.role}.{call.method}"
        self._parts, self._collecting = list(parts), list(collecting)
        self._timeout_s = timeout_s
        self._values: list[Any] | None = None

    def result(self) -> Any:
        """Wait for all ranks; raise WorkerError, or the EngineError of a rank."""
        if self._values is not None:
            return self._values[0]
        with span(self._name):
            return self.value()

    def done(self) -> bool:
        """Whether all ranks are done, or one has failed."""
        return all(p.done() for p in self._parts) or any(
            p.done() and p.exception() for p in self._parts
        )

    def value(self) -> Any:
        """As `result`, without a line in the controller's timeline."""
        if self._values is None:
            first = futures.FIRST_EXCEPTION
            done, not_done = futures.wait(self._parts, self._timeout_s, return_when=first)
            if not any(part.exception() for part in done) and not_done:
                rank = next(r for r, part in enumerate(self._parts) if part in not_done)
                raise WorkerError(late(self._what.format(rank), self._timeout_s))
            results = [part.result() for part in self._parts if part in done]
            self._values = [
                join([r for r, gives in zip(results, self._collecting, strict=True) if gives])
            ]
        return self._values[0]


class LocalGroup(WorkerGroup):
    """A role whose ranks are objects in this process (one rank, in practice)."""

    def __init__(
        self,
        spec: RoleSpec,
        hosts: Sequence[LocalHost],
        timeout_s: float = 1800.0,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(spec, len(hosts), recorder)
        self._hosts, self._timeout_s = hosts, timeout_s

    def _references(self, piece: Batch | Future) -> list[Any]:
        return [piece]

    def _start(
        self, call: Call, flat: list[Any], collecting: list[bool], sources: Sequence[Future]
    ) -> LocalFuture:
        def work(host: Host) -> Any:
            return host.call(call, *[_value(piece) for piece in flat])

        hosts = self._hosts[: len(collecting)]
        parts = [host.submit(lambda host=host.host: work(host)) for host in hosts]  # type: ignore[misc]
        return LocalFuture(call, parts, collecting, self._timeout_s)


def take_spans(hosts: Sequence[LocalHost], timeout_s: float) -> list[Span]:
    """The spans of all hosts, once the calls under way are done."""
    parts = [host.submit(host.host.spans) for host in hosts]
    spans: list[Span] = []
    for host, part in zip(hosts, parts, strict=True):
        if futures.wait([part], timeout_s).not_done:
            raise WorkerError(late(f"{host.host.name}: its timeline", timeout_s))
        spans += part.result()
    return spans


def _value(piece: Batch | Future) -> Any:
    if isinstance(piece, Batch):
        return piece
    return piece.value() if isinstance(piece, LocalFuture) else piece.result()
