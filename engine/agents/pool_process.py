"""One process of environments, from the run's end: calls under way, its deadlines, its restarts."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe

from engine.agents.failures import EnvironmentFailure, FailureCause
from engine.agents.pool_main import (
    CallEnvironment,
    CallKind,
    EnvironmentAnswer,
    EnvironmentLoaded,
    LoadEnvironment,
)
from engine.errors import EngineError, EpisodeError
from engine.rewards.guard import ProcessEnded
from engine.rewards.guarded import START_S, GuardedProcess, TooLate, how_ended

_GRACE_S = 3.0  # after a deadline, and of silence, until a process is held to be stuck
_SEND_S = 10.0


@dataclass(frozen=True, slots=True)
class _Pending:
    """A call under way."""

    call: CallEnvironment
    until: float  # of `time.monotonic`
    future: Future[object]


class EnvironmentProcess:
    """Starts with the first call, and again with the next one after its end.

    A thread of its own sends and receives; everything below `_run` is that thread's.
    """

    def __init__(self, load: LoadEnvironment) -> None:
        self.episodes = 0  # that are open, kept by the pool
        self._load = load
        self._process = GuardedProcess(
            "engine.agents.pool_main:serve", ("engine.agents.pool_main",)
        )
        self._inbox: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._woken, self._wake = Pipe(duplex=False)
        self._waking = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._living: set[int] = set()  # episodes that the process knows
        self._number = 0
        self._heard = 0.0
        self._closed = False
        self._loaded: Future[EnvironmentLoaded] = Future()
        self._thread: threading.Thread | None = None

    def loaded(self) -> EnvironmentLoaded:
        """Start the process and wait for its environment; raise why there is none."""
        self._put(None)
        return self._loaded.result()

    def call(self, episode: int, kind: CallKind, value: object, timeout_s: float) -> Future[object]:
        """Ask for a call; the future ends soon after `timeout_s` at the latest."""
        future: Future[object] = Future()
        with self._waking:
            self._number += 1
            number = self._number
        call = CallEnvironment(number, episode, kind, value, timeout_s)
        self._put(_Pending(call, time.monotonic() + timeout_s + _GRACE_S, future))
        return future

    def leave(self, episode: int) -> None:
        """Give the environment of an episode back."""
        self._put(_Pending(CallEnvironment(0, episode, "leave", None, 0.0), 0.0, Future()))

    def close(self) -> None:
        """End the process; calls under way fail."""
        self._closed = True
        if self._thread is not None:
            self._poke()
            self._thread.join(_SEND_S)
        self._process.close()
        self._fail_all("lost", "the pool of environments was closed")

    def _put(self, pending: _Pending | None) -> None:
        if self._closed:
            if pending is not None and pending.call.kind != "leave":
                self._fail(pending, "lost", "the pool of environments is closed")
            return
        self._inbox.put(pending)
        with self._waking:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
                self._thread.start()
        self._poke()

    def _poke(self) -> None:
        with self._waking, suppress(OSError):
            self._wake.send_bytes(b"+")

    def _run(self) -> None:
        while not self._closed:
            until = min((one.until for one in self._pending.values()), default=float("inf"))
            self._process.wait(self._woken, min(until, time.monotonic() + 3600.0))
            while self._woken.poll():
                self._woken.recv_bytes()
            with suppress(queue.Empty):
                while not self._closed:
                    self._take(self._inbox.get_nowait())
            self._receive()
            self._check_deadlines()

    def _take(self, pending: _Pending | None) -> None:
        """Send a call on, to a process that is started where there is none."""
        if pending is None:
            self._running()
            return
        call = pending.call
        if call.kind == "leave":
            if call.episode in self._living and self._process.running:
                self._living.discard(call.episode)
                self._process.send(call, time.monotonic() + _SEND_S)
            return
        if call.kind in ("step", "get_state") and call.episode not in self._living:
            self._fail(pending, "lost", "the episode's process ended for another episode's sake")
            return
        if not self._running():
            error = self._loaded.exception()
            self._fail(pending, "crashed", f"its process can't be started ({error})")
            return
        self._living.add(call.episode)
        self._pending[call.number] = pending
        try:
            self._process.send(call, time.monotonic() + _SEND_S)
        except Exception as error:  # a row, say, that can't be pickled
            self._pending.pop(call.number)
            words = f"what it is given can't be sent ({type(error).__name__}: {error})"
            self._fail(pending, "malformed", words)

    def _running(self) -> bool:
        """Start the process where it isn't there; whether it is."""
        if self._process.running:
            return True
        loaded: Future[EnvironmentLoaded] = Future()
        name = self._load.name
        answer: object
        try:
            self._process.start()
            deadline = time.monotonic() + START_S
            self._process.send(self._load, deadline)
            answer = self._process.receive(deadline)
        except TooLate:
            self._process.end()
            answer = EpisodeError(f"environment {name!r} was not loaded within {START_S:g} s")
        except Exception as error:  # options that can't be pickled; no more processes
            self._process.end()
            answer = EpisodeError(f"environment {name!r} can't be started: {error}")
        if isinstance(answer, ProcessEnded):
            answer = EpisodeError(
                f"the process of environment {name!r} {how_ended(answer.code)} while it was "
                "loaded; correct what runs on import"
            )
        if isinstance(answer, EnvironmentLoaded):
            loaded.set_result(answer)
        else:
            self._process.end()
            assert isinstance(answer, EngineError)
            loaded.set_exception(answer)
        first, self._loaded = self._loaded, loaded
        if not first.done():  # somebody waits for it
            if isinstance(answer, EnvironmentLoaded):
                first.set_result(answer)
            else:
                first.set_exception(answer)
        self._heard = time.monotonic()
        return self._process.running

    def _receive(self) -> None:
        """Take what has come."""
        while self._process.running:
            try:
                message = self._process.receive(0.0)
            except TooLate:
                return
            except Exception as error:  # no message of ours
                self._process.end()
                self._end_calls(f"sent what can't be read ({type(error).__name__})")
                return
            self._heard = time.monotonic()
            if isinstance(message, ProcessEnded):
                self._end_calls(how_ended(message.code))
            elif isinstance(message, EnvironmentAnswer):
                pending = self._pending.pop(message.number, None)
                if pending is None:
                    continue
                if isinstance(message.value, EnvironmentFailure):
                    if pending.call.kind != "get_state":  # it goes on
                        self._living.discard(pending.call.episode)
                    pending.future.set_exception(message.value)
                else:
                    pending.future.set_result(message.value)

    def _check_deadlines(self) -> None:
        """Give a process up that is late, and from which nothing has come for a while."""
        now = time.monotonic()
        late = [one for one in self._pending.values() if one.until <= now]
        if not late or now - self._heard < _GRACE_S:
            for one in late:  # it is at work: look again
                later = _Pending(one.call, now + _GRACE_S, one.future)
                self._pending[one.call.number] = later
            return
        self._process.end()
        for one in late:
            del self._pending[one.call.number]
            self._fail(one, "deadline", f"gave no answer within {one.call.timeout_s:g} s")
        self._living.clear()
        self._fail_all("lost", "its process was ended for another episode's sake")

    def _end_calls(self, how: str) -> None:
        self._living.clear()
        self._fail_all("crashed", f"its process {how}")

    def _fail_all(self, cause: FailureCause, words: str) -> None:
        pending, self._pending = self._pending, {}
        for one in pending.values():
            self._fail(one, cause, words)

    def _fail(self, pending: _Pending, cause: FailureCause, words: str) -> None:
        who = f"environment {self._load.name!r}: {pending.call.kind}"
        if not pending.future.done():
            pending.future.set_exception(EnvironmentFailure(cause, f"{who}: {words}"))
