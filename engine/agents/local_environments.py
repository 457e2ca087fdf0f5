"""Environments in the rollout's own process: for light ones that never block their thread.

`pool` has the same interface, in processes of their own.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from engine.agents.failures import EnvironmentFailure, checked_observation
from engine.agents.protocol import (
    Action,
    Environment,
    Observation,
    is_resumable,
    tool_schemas,
)

_CLOSE_S = 5.0  # for environments to end

T = TypeVar("T")
MakeEnvironment = Callable[[], Environment]


class OpenEpisode(Protocol):
    """A place for one episode; a call that fails raises EnvironmentFailure by its future."""

    def reset(self, row: Mapping[str, object]) -> Future[Observation]: ...

    def step(self, action: Action) -> Future[Observation]: ...

    def get_state(self) -> Future[bytes]:
        """The state between turns, for `set_state`; only of environments that are `resumable`."""
        ...

    def set_state(self, state: bytes) -> Future[None]:
        """Continue an episode in place of `reset`."""
        ...

    def close(self) -> None:
        """Give the environment back; it plays other episodes, unless it failed."""
        ...


class Environments(Protocol):
    """What episodes are played with: `EnvironmentPool`, `LocalEnvironments`."""

    tools: list[dict[str, object]]  # JSON schemas, the same for every episode
    resumable: bool  # whether their episodes can be saved between turns

    def open(self) -> OpenEpisode: ...

    def close(self) -> None: ...


class LocalEnvironments:
    """Environments that a thread's event loop awaits, one for each episode at a time."""

    def __init__(self, make: MakeEnvironment, *, timeout_s: float = 30.0) -> None:
        """`make` is called whenever all are playing; `timeout_s` is each call's deadline."""
        self.make, self.timeout_s = make, timeout_s
        first = make()
        self.tools, self.resumable = tool_schemas(first), is_resumable(first)
        self.idle: list[Environment] = [first]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()

    def open(self) -> LocalEpisode:
        """A place for one episode."""
        return LocalEpisode(self)

    def start(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Run a coroutine in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Close the environments that play nothing, and end the thread."""

        async def all_closed() -> None:
            idle, self.idle = self.idle, []
            await asyncio.gather(*(discard(one) for one in idle))

        if not self._thread.is_alive():
            return
        with suppress(TimeoutError):
            self.start(all_closed()).result(2 * _CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


class LocalEpisode:
    """One episode at a time."""

    def __init__(self, environments: LocalEnvironments) -> None:
        self._all = environments
        self._environment: Environment | None = None

    def reset(self, row: Mapping[str, object]) -> Future[Observation]:
        """Begin the episode of a row."""
        return self._all.start(self._call("reset", row))

    def step(self, action: Action) -> Future[Observation]:
        """Answer a turn of the policy."""
        return self._all.start(self._call("step", action))

    def get_state(self) -> Future[bytes]:
        """The state between turns; a failure costs the episode nothing."""

        async def state() -> bytes:
            environment: Any = self._environment
            return pickle.dumps(environment.get_state())

        return self._all.start(state())

    def set_state(self, state: bytes) -> Future[None]:
        """Continue an episode in place of `reset`."""

        async def restored() -> None:
            environment: Any = self._take()
            environment.set_state(pickle.loads(state))

        return self._all.start(restored())

    def close(self) -> None:
        """Give the environment back."""

        async def give_back() -> None:
            if self._environment is not None:
                self._all.idle.append(self._environment)
                self._environment = None

        self._all.start(give_back())

    async def _call(self, kind: str, value: object) -> Observation:
        who, limit = f"the environment's {kind}", self._all.timeout_s
        try:
            answer = await asyncio.wait_for(getattr(self._take(), kind)(value), limit)
            return checked_observation(who, answer)
        except TimeoutError:
            failure = EnvironmentFailure("deadline", f"{who} gave no answer within {limit:g} s")
        except EnvironmentFailure as error:
            failure = error
        except Exception as error:  # an environment is code of others
            failure = EnvironmentFailure.of(who, error)
        failed, self._environment = self._environment, None
        if failed is not None:
            await discard(failed)
        raise failure

    def _take(self) -> Environment:
        if self._environment is None:
            idle = self._all.idle
            self._environment = idle.pop() if idle else self._all.make()
        return self._environment


async def discard(environment: Environment) -> None:
    """Close an environment that nobody plays with again, whatever it says to that."""
    with suppress(Exception):
        await asyncio.wait_for(environment.close(), _CLOSE_S)
