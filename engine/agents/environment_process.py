"""The program of a process of environments: many of them in one loop, each call with a deadline.

The run's side is `environment_pool`. Imports neither torch nor pydantic.
"""

from __future__ import annotations

import asyncio
import pickle
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
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
_REPEAT_S = 0.1  # of the alarm, for code that catches everything
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class LoadEnvironment:
    """The first request of a process: which environments it holds."""

    name: str  # as `rollout.agent.environment.name`
    options: Mapping[str, object]
    plugins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EnvironmentLoaded:
    """Answers `LoadEnvironment`; a ConfigError in its place says why there is none."""

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


class Interrupted(BaseException):
    """The alarm: an environment's code has kept the loop beyond its deadline."""


def serve(channel: Connection) -> None:
    """Load the environment's class, then answer calls until the other end closes."""
    try:
        load: LoadEnvironment = channel.recv()
    except EOFError:
        return
    try:
        if ":" not in load.name:
            import_plugins(load.plugins)
        environment_class(load.name)
        first = make_environment(load.name, load.options)
        loaded = EnvironmentLoaded(tool_schemas(first), is_resumable(first))
    except EngineError as error:
        channel.send(ConfigError(str(error)))
        return
    except Exception as error:  # a user's class may fail in any way
        told = EnvironmentFailure.of(f"environment {load.name!r}", error)
        channel.send(ConfigError(f"{told}; it must be made without an error"))
        return
    channel.send(loaded)
    asyncio.run(_Host(channel, load, first).run())


class _Host:
    """The environments of this process, by the episodes that they play."""

    def __init__(self, channel: Connection, load: LoadEnvironment, first: Environment) -> None:
        self._channel, self._load = channel, load
        self._idle = [first]
        self._playing: dict[int, Environment] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed = asyncio.Event()
        self._inside = False
        self._answers: queue.SimpleQueue[EnvironmentAnswer] = queue.SimpleQueue()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGALRM, self._alarm)
        # On a thread: the run may be sending, too, and reads nothing meanwhile.
        threading.Thread(target=self._send, name="answers", daemon=True).start()
        loop.add_reader(self._channel.fileno(), self._read)
        await self._closed.wait()

    def _read(self) -> None:
        try:
            call: CallEnvironment = self._channel.recv()
        except (EOFError, OSError):
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

    async def _answer(self, call: CallEnvironment) -> None:
        try:
            value = await self._called(call)
        except EnvironmentFailure as failure:
            value = failure
            if call.kind != "get_state":  # an episode that can't be saved goes on
                self._replace(call.episode)
        self._answers.put(EnvironmentAnswer(call.number, value))

    def _send(self) -> None:
        while True:
            answer = self._answers.get()
            try:
                self._channel.send(answer)
            except OSError:  # the run is gone, which the loop sees as well
                return
            sys.stdout.flush()

    async def _called(self, call: CallEnvironment) -> object:
        """The call's checked result, in time; raise EnvironmentFailure for anything else."""
        who = f"environment {self._load.name!r}: {call.kind}"
        until = time.monotonic() + call.timeout_s
        task = self._start(self._driven(self._do(call), until))
        await asyncio.wait({task}, timeout=call.timeout_s)
        late = EnvironmentFailure("deadline", f"{who} gave no answer within {call.timeout_s:g} s")
        if not task.done():
            task.cancel()
            task.add_done_callback(_seen)
            raise late
        if task.cancelled():
            raise EnvironmentFailure("raised", f"{who} was cancelled by its own code")
        error = task.exception()
        if isinstance(error, Interrupted):
            raise late
        if isinstance(error, EnvironmentFailure):
            raise error
        if error is not None:
            raise EnvironmentFailure.of(who, error)
        if call.kind in ("reset", "step"):
            return checked_observation(who, task.result())
        return task.result()

    async def _do(self, call: CallEnvironment) -> object:
        if call.kind in ("reset", "set_state") and call.episode not in self._playing:
            made = self._idle.pop() if self._idle else None
            made = made or make_environment(self._load.name, self._load.options)
            self._playing[call.episode] = made
        environment: Any = self._playing.get(call.episode)
        if environment is None:
            raise EnvironmentFailure("lost", "the episode has no environment; reset it first")
        if call.kind == "get_state":
            return pickle.dumps(environment.get_state())
        if call.kind == "set_state":
            environment.set_state(pickle.loads(call.value))
            return None
        return await (environment.reset if call.kind == "reset" else environment.step)(call.value)

    async def _driven(self, coroutine: Coroutine[object, object, T], until: float) -> T:
        """Run a coroutine with an alarm on whatever it does between two waits."""
        return await self._alarmed(coroutine, until)

    @types.coroutine
    def _alarmed(
        self, coroutine: Coroutine[object, object, T], until: float
    ) -> Generator[object, object, T]:
        step: Callable[[], object] = lambda: coroutine.send(None)  # noqa: E731
        while True:
            try:
                self._inside = True
                left = max(until - time.monotonic(), 0.001)
                signal.setitimer(signal.ITIMER_REAL, left, _REPEAT_S)
                waited = step()
            except StopIteration as end:
                return end.value
            except SystemExit as stop:  # asyncio would end the process with it
                raise RuntimeError(f"SystemExit: {stop.code}") from stop
            except KeyboardInterrupt as stop:
                raise RuntimeError("KeyboardInterrupt") from stop
            finally:
                self._inside = False
                signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                sent = yield waited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:  # a cancellation is the coroutine's to see
                step = _throwing(coroutine, error)
            else:
                step = _sending(coroutine, sent)

    def _alarm(self, *_: object) -> None:
        if self._inside:
            raise Interrupted

    def _replace(self, episode: int) -> None:
        """Forget an environment that failed; it is closed, if it can be."""
        environment = self._playing.pop(episode, None)
        if environment is not None:
            until = time.monotonic() + _CLOSE_S
            task = self._start(self._driven(_closing(environment), until))
            task.add_done_callback(_seen)
            asyncio.get_running_loop().call_later(_CLOSE_S, task.cancel)


async def _closing(environment: Environment) -> None:
    await environment.close()


def _sending(coroutine: Coroutine[object, object, object], value: object) -> Callable[[], object]:
    return lambda: coroutine.send(value)


def _throwing(
    coroutine: Coroutine[object, object, object], error: BaseException
) -> Callable[[], object]:
    return lambda: coroutine.throw(error)


def _seen(task: asyncio.Task[object]) -> None:
    """What a call that was given up ends with matters to nobody."""
    if not task.cancelled():
        task.exception()
