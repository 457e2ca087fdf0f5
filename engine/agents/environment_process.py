"""What runs in a process of environments: many of them in one loop, each call with a deadline.

The run's side is `environment_pool`, the process `engine.worker_process`. A call that waits ends at
its deadline, and costs its own episode. Code that keeps the loop from going on can't be stopped:
it is reported, and the run ends the process. Imports neither torch nor pydantic.
"""

from __future__ import annotations

import asyncio
import pickle
import queue
import sys
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias, TypeVar

from engine.agents.environment_protocol import (
    Environment,
    EnvironmentFailure,
    checked_observation,
    environment_class,
    is_resumable,
    make_environment,
    tool_schemas,
)
from engine.errors import ConfigError, EngineError
from engine.registry import import_plugins

T = TypeVar("T")
CallKind: TypeAlias = Literal["reset", "step", "get_state", "set_state", "leave"]
_TICK_S = 0.1  # between two signs of life of the loop
_STUCK_S = 1.0  # without one, after a deadline, until the loop is reported
_CLOSE_S = 5.0


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


def open_service(load: LoadEnvironment, channel: Connection) -> EnvironmentService:
    """Load the environment's class, and make a first one."""
    try:
        if ":" not in load.name:
            import_plugins(load.plugins)
        environment_class(load.name)
        first = make_environment(load.name, load.options)
        loaded = EnvironmentLoaded(tool_schemas(first), is_resumable(first))
    except EngineError:
        raise
    except Exception as error:  # a user's class may fail in any way
        failure = EnvironmentFailure.of(f"environment {load.name!r}", error)
        raise ConfigError(f"{failure}; it must be made without an error") from error
    return EnvironmentService(load, loaded, first, channel)


class EnvironmentService:
    """The environments of this process, by the episodes that they play."""

    def __init__(
        self,
        load: LoadEnvironment,
        loaded: EnvironmentLoaded,
        first: Environment,
        channel: Connection,
    ) -> None:
        self._load, self.loaded, self._channel = load, loaded, channel
        self._idle = [first]
        self._playing: dict[int, Environment] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._under_way: dict[asyncio.Task[object], tuple[int, float]] = {}  # number, deadline
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
        if call.kind == "leave":
            environment = self._playing.pop(call.episode, None)
            if environment is not None:
                self._idle.append(environment)
            return
        self._start(self._answer(call))

    def _start(self, coroutine: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

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
            now = time.monotonic()
            calls = self._under_way.copy()
            if now - self._alive < _STUCK_S or all(until > now for _, until in calls.values()):
                continue
            running = asyncio.current_task(loop)
            number, until = calls.get(running, (0, now)) if running is not None else (0, now)
            if until <= now:
                self._answers.put(LoopStuck(number))
                return

    async def _answer(self, call: CallEnvironment) -> None:
        try:
            value = await self._result(call)
        except EnvironmentFailure as failure:
            value = failure
            if call.kind != "get_state":  # an episode that can't be saved goes on
                self._replace(call.episode)
        self._answers.put(EnvironmentAnswer(call.number, value))

    async def _result(self, call: CallEnvironment) -> object:
        """The call's checked result, in time; raise EnvironmentFailure for anything else."""
        who = f"environment {self._load.name!r}: {call.kind}"
        task = self._start(self._call(call))
        self._under_way[task] = call.number, time.monotonic() + call.timeout_s
        await asyncio.wait({task}, timeout=call.timeout_s)
        del self._under_way[task]
        if not task.done():
            _give_up(task)
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

    async def _call(self, call: CallEnvironment) -> object:
        if call.kind in ("reset", "set_state") and call.episode not in self._playing:
            environment: Any = self._idle.pop() if self._idle else None
            environment = environment or make_environment(self._load.name, self._load.options)
            self._playing[call.episode] = environment
        environment = self._playing.get(call.episode)
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

    def _replace(self, episode: int) -> None:
        """Forget an environment that failed; it is closed, if it can be."""
        environment = self._playing.pop(episode, None)
        if environment is not None:
            task = self._start(_closing(environment))
            asyncio.get_running_loop().call_later(_CLOSE_S, _give_up, task)
            task.add_done_callback(_retrieve)


async def _closing(environment: Environment) -> None:
    with suppress(SystemExit, KeyboardInterrupt):  # asyncio would end the process with it
        await environment.close()


def _give_up(task: asyncio.Task[Any]) -> None:
    task.cancel()
    task.add_done_callback(_retrieve)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take the exception, of which asyncio would complain otherwise."""
    if not task.cancelled():
        task.exception()
