"""The environments of an event loop, and the process that runs one.

`EnvironmentHost` has many environments in a loop, and a deadline for each call; the rollout's own
process may have one (`agent_loop`). `open_service` makes what runs in a process of environments:
`environment_pool` has the run's side, `engine.worker_process` the process. A call that waits ends
at its deadline, and costs its own episode. Code that keeps the loop from going on can't be stopped:
it is reported, and the run ends the process. Imports neither torch nor pydantic.
"""

from __future__ import annotations

import asyncio
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias

from engine.agents.environment_protocol import (
    Action,
    Environment,
    EnvironmentFailure,
    Observation,
    checked_observation,
    environment_class,
    is_resumable,
    make_environment,
    tool_schemas,
)
from engine.errors import ConfigError, EngineError
from engine.registry import import_plugins

CallKind: TypeAlias = Literal["reset", "step", "get_state", "set_state", "leave"]
_TICK_S = 0.1  # between two signs of life of the loop
_STUCK_S = 1.0  # without one, after the deadline of the call that runs, until it is reported
CLOSE_S = 5.0  # for an environment to close


@dataclass(frozen=True, slots=True)
class LoadEnvironment:
    """The first request of a process: which environments it holds."""

    name: str  # as `rollout.agent.environment.name`
    options: Mapping[str, object]
    plugins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EnvironmentLoaded:
    """Answers `LoadEnvironment`."""

    tools: list[dict[str, object]]
    resumable: bool


@dataclass(frozen=True, slots=True)
class CallEnvironment:
    """A call; `leave` gives an episode's environment back, and has no answer."""

    number: int
    episode: int
    kind: CallKind
    value: Any  # a row, an Action, a state's bytes, or None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class EnvironmentAnswer:
    """What a call gave: an Observation, a state's bytes, None, or an EnvironmentFailure."""

    number: int
    value: object


@dataclass(frozen=True, slots=True)
class LoopStuck:
    """A call's code keeps the loop beyond its deadline, so that no other goes on."""

    number: int  # of the call; 0 where that has been given up before


class OpenEpisode:
    """A place for one episode at a time, and the environment that plays it.

    A call that fails raises EnvironmentFailure by its future.
    """

    def reset(self, row: Mapping[str, object]) -> Future[Observation]:
        """Begin the episode of a row, also after a failure."""
        return self._call("reset", dict(row))

    def step(self, action: Action) -> Future[Observation]:
        """Answer a turn of the policy."""
        return self._call("step", action)

    def get_state(self) -> Future[bytes]:
        """The state between turns; only of environments that are resumable. It costs no episode."""
        return self._call("get_state", None)

    def set_state(self, state: bytes) -> Future[None]:
        """Continue an episode, of this or of another process, in place of `reset`."""
        return self._call("set_state", state)

    def close(self) -> None:
        """Give the environment back; it plays other episodes, unless it failed."""
        self._call("leave", None)

    def _call(self, kind: CallKind, value: object) -> Future[Any]:
        raise NotImplementedError


class EnvironmentHost:
    """The environments of an event loop, by the episodes that they play."""

    def __init__(self, name: str, make: Callable[[], Environment]) -> None:
        """`make` is called now, and whenever all are playing; failures call them by `name`."""
        self._name, self._make = name, make
        first = make()
        self.tools, self.resumable = tool_schemas(first), is_resumable(first)
        self._idle = [first]
        self._playing: dict[int, Environment] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self.under_way: dict[asyncio.Task[object], tuple[int, float]] = {}  # number, deadline

    async def call(self, call: CallEnvironment) -> object:
        """The call's checked result, in time; raise EnvironmentFailure for anything else.

        An environment that failed is replaced, unless it just couldn't give its state.
        """
        if call.kind == "leave":
            environment = self._playing.pop(call.episode, None)
            if environment is not None:
                self._idle.append(environment)
            return None
        try:
            return await self._result(call)
        except EnvironmentFailure:
            if call.kind != "get_state" and call.episode in self._playing:
                closing = asyncio.create_task(_close(self._playing.pop(call.episode)))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            raise

    async def close(self) -> None:
        """Close the environments that play nothing."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*map(_close, idle), *self._closing)

    async def _result(self, call: CallEnvironment) -> object:
        who = f"{self._name}: {call.kind}"
        task = asyncio.create_task(self._run(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.under_way[task] = call.number, time.monotonic() + call.timeout_s
        await asyncio.wait({task}, timeout=call.timeout_s)
        del self.under_way[task]
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            words = f"{who} gave no answer within {call.timeout_s:g} s"
            raise EnvironmentFailure("deadline", words)
        if task.cancelled():
            raise EnvironmentFailure("raised", f"{who} was cancelled by its own code")
        error = task.exception()
        if isinstance(error, EnvironmentFailure):
            raise error
        if error is not None:
            raise EnvironmentFailure.of(who, error)
        if call.kind in ("reset", "step"):
            return checked_observation(who, task.result())
        return task.result()

    async def _run(self, call: CallEnvironment) -> object:
        if call.kind in ("reset", "set_state") and call.episode not in self._playing:
            self._playing[call.episode] = self._idle.pop() if self._idle else self._make()
        environment: Any = self._playing.get(call.episode)
        if environment is None:
            raise EnvironmentFailure("lost", "the episode has no environment; reset it first")
        try:
            if call.kind == "get_state":
                return pickle.dumps(environment.get_state())
            if call.kind == "set_state":
                environment.set_state(pickle.loads(call.value))
                return None
            method = environment.reset if call.kind == "reset" else environment.step
            return await method(call.value)
        except (SystemExit, KeyboardInterrupt) as stop:  # asyncio would end the process with it
            raise RuntimeError(f"{type(stop).__name__}: {stop}") from stop


async def _close(environment: Environment) -> None:
    """Close an environment that nobody plays with again, whatever it says to that."""
    with suppress(Exception, SystemExit, KeyboardInterrupt):
        await asyncio.wait_for(environment.close(), CLOSE_S)


def open_service(load: LoadEnvironment, channel: Connection) -> EnvironmentService:
    """Load the environment's class, and make a first one."""
    name = f"environment {load.name!r}"
    try:
        if ":" not in load.name:
            import_plugins(load.plugins)
        environment_class(load.name)
        host = EnvironmentHost(name, partial(make_environment, load.name, load.options))
    except EngineError:
        raise
    except Exception as error:  # a user's class may fail in any way
        failure = EnvironmentFailure.of(name, error)
        raise ConfigError(f"{failure}; it must be made without an error") from error
    return EnvironmentService(host, channel)


class EnvironmentService:
    """Answers calls in a process of environments."""

    def __init__(self, host: EnvironmentHost, channel: Connection) -> None:
        self._host, self._channel = host, channel
        self.loaded = EnvironmentLoaded(host.tools, host.resumable)
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: queue.SimpleQueue[EnvironmentAnswer | LoopStuck] = queue.SimpleQueue()
        self._alive = time.monotonic()  # when the loop went on last

    def run(self) -> None:
        """Answer calls until the other end closes."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
        # On threads: the run may be sending, too, and reads nothing meanwhile.
        threading.Thread(target=self._send, name="answers", daemon=True).start()
        threading.Thread(target=self._watch, args=(loop,), name="watch", daemon=True).start()
        loop.add_reader(self._channel.fileno(), self._read)
        while not self._closed.is_set():
            self._alive = time.monotonic()
            await asyncio.sleep(_TICK_S)

    def _read(self) -> None:
        try:
            call: CallEnvironment = self._channel.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._closed.set()
            return
        task = asyncio.get_running_loop().create_task(self._answer(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: CallEnvironment) -> None:
        try:
            value = await self._host.call(call)
        except EnvironmentFailure as failure:
            value = failure
        if call.kind != "leave":
            self._answers.put(EnvironmentAnswer(call.number, value))

    def _send(self) -> None:
        while True:
            answer = self._answers.get()
            try:
                self._channel.send(answer)
            except OSError:  # the run is gone, which the loop sees as well
                return
            sys.stdout.flush()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report a loop that doesn't go on though the deadline of a call has passed."""
        while True:
            time.sleep(_TICK_S)
            alive, now = self._alive, time.monotonic()
            calls, running = self._host.under_way.copy(), asyncio.current_task(loop)
            if running is None or all(until > now for _, until in calls.values()):
                continue
            number, until = calls.get(running, (0, now))
            if until > now:
                continue
            time.sleep(_STUCK_S)
            if self._alive == alive:
                self._answers.put(LoopStuck(number))
                return
