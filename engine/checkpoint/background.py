"""One background call at a time, in a worker thread; its error is raised by `wait`."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from engine.errors import CheckpointError, EngineError
from engine.storage.folder import CheckpointStorageError

log = logging.getLogger(__name__)

_Calls = queue.SimpleQueue[Callable[[], None] | None]  # None ends the thread


class Background:
    """Runs one call at a time in its worker thread; a second one waits for the first."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """`name` says whose work it is; a wait that takes longer than `timeout_s` is an error."""
        self.name, self.timeout_s = name, timeout_s
        self._done: Future[None] | None = None
        self._calls: _Calls | None = None  # the worker thread's queue; the first call starts it

    @property
    def busy(self) -> bool:
        """Whether work is under way."""
        return self._done is not None and not self._done.done()

    def start(self, work: Callable[[], None]) -> None:
        """Wait for earlier work, raise its error if it had one, and start this."""
        self.wait()
        self._done = Future()
        if self._calls is None:
            self._calls = self._start_thread()
        self._calls.put(partial(_run, work, self._done, self.name))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is under way; raise an EngineError, once, if that went wrong."""
        if self._done is None:
            return
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            error = self._done.exception(limit)
        except TimeoutError:
            raise CheckpointStorageError(
                f"{self.name} has not ended in {limit:g} s; check the disk or the object store, "
                "or give it a longer timeout"
            ) from None
        self._done = None
        if isinstance(error, EngineError):
            raise error
        if error is not None:
            raise CheckpointError(
                f"{self.name} failed with {type(error).__name__}: {error}"
            ) from error

    def _start_thread(self) -> _Calls:
        """Start the worker thread, which ends with this object; return its queue.

        One for all calls: in a large process it takes a millisecond to start a thread.
        """
        calls: _Calls = queue.SimpleQueue()
        # A daemon: a process that ends in the middle leaves a torn folder, which is never loaded.
        threading.Thread(target=_run_all, args=(calls,), name=self.name, daemon=True).start()
        weakref.finalize(self, calls.put, None)
        return calls


def _run_all(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # or its tensors would stay until the next


def _run(work: Callable[[], None], done: Future[None], name: str) -> None:
    try:
        work()
    except BaseException as error:  # raised by `wait`
        log.warning("%s failed: %s", name, error)
        done.set_exception(error)
    else:
        done.set_result(None)
