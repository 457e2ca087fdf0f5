"""Environments in processes of their own: many at once, none of which can hold up the run.

    with EnvironmentPool("my_module:MyEnvironment") as pool:
        episode = pool.open()
        first = episode.reset(row).result()         # futures: of concurrent.futures, or by
        after = episode.step(action).result()       # asyncio.wrap_future in a coroutine
        episode.close()

Every call ends by its deadline, in an observation or in an EnvironmentFailure. An environment that
hangs, raises or returns what is no observation is replaced; other episodes go on. One that ends its
process, or keeps it from answering, costs the process: other episodes there fail as `lost`, and
restart in a new one. What runs in the process is `environment_process`.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from engine.agents.environment_process import (
    CallEnvironment,
    CallKind,
    EnvironmentAnswer,
    EnvironmentLoaded,
    LoadEnvironment,
    LoopStuck,
    OpenEpisode,
)
from engine.agents.environment_protocol import (
    EnvironmentFailure,
    FailureCause,
    Observation,
    environment_module,
)
from engine.errors import ConfigError, EngineError, EpisodeError, WorkerError
from engine.worker_process import ProcessEnded, TooLate, WorkerProcess

# One process of environments: calls under way, its deadlines, its restarts.

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
        self._process = WorkerProcess(
            f"environment {load.name!r}", "engine.agents.environment_process:open_service"
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
            until = min((pending.until for pending in self._pending.values()), default=float("inf"))
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
        try:
            answer = self._process.start(self._load)
            assert isinstance(answer, EnvironmentLoaded)
            loaded.set_result(answer)
        except WorkerError as error:
            loaded.set_exception(EpisodeError(str(error)))
        except EngineError as error:
            loaded.set_exception(error)
        except Exception as error:  # options that can't be pickled; no more processes
            words = f"environment {self._load.name!r} can't be started: {error}"
            loaded.set_exception(EpisodeError(words))
        first, self._loaded = self._loaded, loaded
        if not first.done():  # somebody waits for it
            error_of_start = loaded.exception()
            if error_of_start is None:
                first.set_result(loaded.result())
            else:
                first.set_exception(error_of_start)
        self._heard = time.monotonic()
        return self._process.running

    def _receive(self) -> None:
        """Take what has come."""
        while self._process.running:
            try:
                message = self._process.receive(0.0)
            except TooLate:
                return
            self._heard = time.monotonic()
            if isinstance(message, ProcessEnded):
                self._living.clear()
                self._fail_all("crashed", f"its process {message.how}", message.stderr)
            elif isinstance(message, LoopStuck):
                self._give_up([message.number])
            elif isinstance(message, EnvironmentAnswer):
                self._answer(message)

    def _answer(self, answer: EnvironmentAnswer) -> None:
        pending = self._pending.pop(answer.number, None)
        if pending is None:
            return
        if isinstance(answer.value, EnvironmentFailure):
            if pending.call.kind != "get_state":  # it goes on
                self._living.discard(pending.call.episode)
            pending.future.set_exception(answer.value)
        else:
            pending.future.set_result(answer.value)

    def _check_deadlines(self) -> None:
        """Give a process up that is late, and from which nothing has come for a while."""
        now = time.monotonic()
        late = [pending for pending in self._pending.values() if pending.until <= now]
        if not late or now - self._heard < _GRACE_S:
            for pending in late:  # it is at work: look again
                later = _Pending(pending.call, now + _GRACE_S, pending.future)
                self._pending[pending.call.number] = later
            return
        self._give_up([pending.call.number for pending in late])

    def _give_up(self, late: Sequence[int]) -> None:
        """End the process for the calls of these numbers; the others are lost with it."""
        self._process.end()
        self._living.clear()
        for number in late:
            if (pending := self._pending.pop(number, None)) is not None:
                words = f"gave no answer within {pending.call.timeout_s:g} s"
                self._fail(pending, "deadline", words)
        self._fail_all("lost", "its process was ended for another episode's sake")

    def _fail_all(self, cause: FailureCause, words: str, stderr: str = "") -> None:
        calls, self._pending = self._pending, {}
        for pending in calls.values():
            self._fail(pending, cause, words, stderr)

    def _fail(self, pending: _Pending, cause: FailureCause, words: str, stderr: str = "") -> None:
        who = f"environment {self._load.name!r}: {pending.call.kind}"
        if not pending.future.done():
            failure = EnvironmentFailure(cause, f"{who}: {words}", stderr)
            pending.future.set_exception(failure)


OnFailure: TypeAlias = Literal["drop", "score", "fail"]
_MOST_PROCESSES = 8  # unless asked for


class EnvironmentPool:
    """Processes that play episodes of one environment; a context manager.

    Raises ConfigError for an environment that can't be made, and EpisodeError where its process
    ends while it is loaded.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, object] | None = None,
        *,
        plugins: tuple[str, ...] = (),
        processes: int = 0,
        timeout_s: float = 30.0,
        on_failure: OnFailure = "drop",
        failure_reward: float = 0.0,
    ) -> None:
        """`plugins` are modules that may register the environment.

        `processes` of 0 are as many as cores, 8 at most; `timeout_s` is each call's deadline. A
        `step` that fails raises EnvironmentFailure, or with `on_failure="score"` ends its episode
        with `failure_reward` and `info["failure"]`; "drop" and "fail" are for the caller to tell
        apart. A `reset` that fails raises in any case: there is nothing to score yet.
        """
        if timeout_s <= 0 or processes < 0:
            raise ConfigError(
                f"rollout.agent.call_timeout_s={timeout_s} and num_workers={processes}: give a "
                "time above 0, and 0 or more processes"
            )
        if environment_module(name) == "__main__":
            raise ConfigError(
                f"rollout.agent.environment.name={name!r} is defined in the program that runs, "
                "which its own process can't import; move it into a module"
            )
        self.name, self.on_failure = name, on_failure
        self.timeout_s, self.failure_reward = timeout_s, failure_reward
        load = LoadEnvironment(name, dict(options or {}), plugins)
        count = processes or min(_MOST_PROCESSES, os.cpu_count() or 1)
        self._processes = [EnvironmentProcess(load) for _ in range(count)]
        self.lock = threading.Lock()
        self._opened = 0
        self.failures: Counter[str] = Counter()  # by cause, since the start
        try:
            loaded = self._processes[0].loaded()
        except BaseException:
            self.close()
            raise
        self.tools, self.resumable = loaded.tools, loaded.resumable

    def open(self) -> PooledEpisode:
        """A place for one episode, in the process that has the fewest."""
        with self.lock:
            process = min(self._processes, key=lambda process: process.episodes)
            process.episodes += 1
            self._opened += 1
            return PooledEpisode(self, process, self._opened)

    def close(self) -> None:
        """End all processes and what they left behind; calls under way fail."""
        for process in self._processes:
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class PooledEpisode(OpenEpisode):
    """An episode of a pool's process; `pool.open` makes them."""

    def __init__(self, pool: EnvironmentPool, process: EnvironmentProcess, number: int) -> None:
        self._pool, self._process, self._number = pool, process, number
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._process.leave(self._number)
            with self._pool.lock:
                self._process.episodes -= 1

    def _call(self, kind: CallKind, value: object) -> Future[Any]:
        answer = self._process.call(self._number, kind, value, self._pool.timeout_s)
        future: Future[Any] = Future()
        answer.add_done_callback(lambda done: self._pass_on(kind, done, future))
        return future

    def _pass_on(self, kind: CallKind, answer: Future[object], future: Future[object]) -> None:
        """Pass an answer on; a failure as the pool's policy says."""
        failure = answer.exception()
        if not future.set_running_or_notify_cancel():
            return
        if failure is None:
            future.set_result(answer.result())
            return
        if isinstance(failure, EnvironmentFailure):
            with self._pool.lock:
                self._pool.failures[failure.cause] += 1
            if kind == "step" and self._pool.on_failure == "score":
                info = {"failure": failure.cause}
                future.set_result(Observation((), self._pool.failure_reward, True, info))
                return
        future.set_exception(failure)
