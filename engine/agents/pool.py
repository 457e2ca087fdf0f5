"""Environments in processes of their own: many at once, and none that can hold up the run.

    with EnvironmentPool("my_module:MyEnvironment") as pool:
        episode = pool.open()
        first = episode.reset(row).result()         # futures: of concurrent.futures, or by
        after = episode.step(action).result()       # asyncio.wrap_future in a coroutine
        episode.close()

Every call ends by its deadline, in an observation or in an EnvironmentFailure. An environment that
hangs, dies, raises or returns what is no observation is replaced; other episodes go on.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from engine.agents.failures import EnvironmentFailure
from engine.agents.pool_main import CallKind, LoadEnvironment
from engine.agents.pool_process import EnvironmentProcess
from engine.agents.protocol import Action, Observation
from engine.agents.registry import environment_module
from engine.errors import ConfigError

OnFailure: TypeAlias = Literal["drop", "score", "fail"]
_MOST = 8  # processes, unless asked for


class EnvironmentPool:
    """Plays episodes of one environment; a context manager.

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
        self._timeout_s, self._failure_reward = timeout_s, failure_reward
        load = LoadEnvironment(name, dict(options or {}), plugins)
        count = processes or min(_MOST, os.cpu_count() or 1)
        self._processes = [EnvironmentProcess(load) for _ in range(count)]
        self._lock = threading.Lock()
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
        with self._lock:
            process = min(self._processes, key=lambda one: one.episodes)
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

    def _left(self, process: EnvironmentProcess) -> None:
        with self._lock:
            process.episodes -= 1

    def _count(self, failure: EnvironmentFailure) -> None:
        with self._lock:
            self.failures[failure.cause] += 1


class PooledEpisode:
    """One episode at a time, and the environment that plays it; `pool.open` makes them."""

    def __init__(self, pool: EnvironmentPool, process: EnvironmentProcess, number: int) -> None:
        self._pool, self._process, self._number = pool, process, number
        self._closed = False

    def reset(self, row: Mapping[str, object]) -> Future[Observation]:
        """Begin the episode of a row, also after a failure."""
        return self._call("reset", dict(row))

    def step(self, action: Action) -> Future[Observation]:
        """Answer a turn of the policy."""
        return self._call("step", action)

    def get_state(self) -> Future[bytes]:
        """The state between turns, for `set_state`; only where the pool is `resumable`."""
        return self._call("get_state", None)

    def set_state(self, state: bytes) -> Future[None]:
        """Continue an episode, of this or of another pool, in place of `reset`."""
        return self._call("set_state", state)

    def close(self) -> None:
        """Give the environment back; it plays other episodes."""
        if not self._closed:
            self._closed = True
            self._process.leave(self._number)
            self._pool._left(self._process)

    def _call(self, kind: CallKind, value: object) -> Future[Any]:
        asked = self._process.call(self._number, kind, value, self._pool._timeout_s)
        told: Future[Any] = Future()
        asked.add_done_callback(lambda done: self._tell(kind, done, told))
        return told

    def _tell(self, kind: CallKind, done: Future[object], told: Future[object]) -> None:
        """Pass an answer on; a failure as the pool's policy says."""
        failure = done.exception()
        if not told.set_running_or_notify_cancel():
            return
        if failure is None:
            told.set_result(done.result())
            return
        if isinstance(failure, EnvironmentFailure):
            self._pool._count(failure)
            if kind == "step" and self._pool.on_failure == "score":
                info = {"failure": failure.cause}
                told.set_result(Observation((), self._pool._failure_reward, True, info))
                return
        told.set_exception(failure)
