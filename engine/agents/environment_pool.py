"""Environments in processes of their own: many at once, none of which can hold up the run.

    with EnvironmentPool("my_module:MyEnvironment") as pool:
        episode = pool.open()
        first = episode.reset(row).result()         # futures: of concurrent.futures, or by
        after = episode.step(action).result()       # asyncio.wrap_future in a coroutine
        episode.close()

Every call ends by its deadline, in an observation or in an EnvironmentFailure. An environment that
hangs, raises or returns what is no observation is replaced; other episodes go on. One that ends its
process, or keeps it from answering, costs the process (`engine.worker_process`): other episodes
there fail as `lost`, and restart in a new one. Imports neither torch nor pydantic.
"""

import asyncio
import itertools
import math
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, TypeAlias

from engine.agents import environment_protocol as protocol
from engine.errors import ConfigError, EngineError, EpisodeError, WorkerError
from engine.registry import import_plugins
from engine.worker_process import ProcessEnded, TooLate, WorkerProcess

CLOSE_S = 5.0  # for an environment to close
_TICK_S = 0.1  # between two signs of life of the loop
_STUCK_S = 1.0  # without one, after the deadline of the call that runs, until it is reported
_GRACE_S = 3.0  # after a deadline, and of silence, until a process is held to be stuck
_SEND_S = 10.0
_MOST_PROCESSES = 8  # unless asked for

CallKind: TypeAlias = Literal["reset", "step", "get_state", "set_state", "leave"]


@dataclass(frozen=True, slots=True)
class CallEnvironment:
    """A call; `leave` gives an episode's environment back, and has no answer."""

    number: int
    episode: int
    kind: CallKind
    value: Any  # a row, an Action, a state's bytes, or None
    timeout_s: float


class OpenEpisode:
    """A place for one episode, and what plays it; a failed call's future has EnvironmentFailure."""

    def __init__(self, call: Callable[[CallKind, Any], Future[Any]]) -> None:
        self._call = call
        self._closed = False

    def reset(self, row: Mapping[str, object]) -> Future[protocol.Observation]:
        """Begin the episode of a row, also after a failure."""
        return self._call("reset", dict(row))

    def step(self, action: protocol.Action) -> Future[protocol.Observation]:
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
        if not self._closed:
            self._closed = True
            self._call("leave", None)


# Environments in an event loop, with a deadline for each call. A call that waits ends at its
# deadline, and costs its own episode. Code that keeps the loop from going on can't be stopped: it
# is reported, and the run ends the process. `agent_loop` may have a loop in the run's own process.


class EnvironmentHost:
    """The environments of an event loop, by the episodes that they play."""

    def __init__(self, name: str, make: Callable[[], protocol.Environment]) -> None:
        """`make` is called now, and whenever all are playing; failures call them by `name`."""
        self._name, self._make = name, make
        first = make()
        self.tools = protocol.tool_schemas(first)
        self.resumable = isinstance(first, protocol.ResumableEnvironment)
        self._idle = [first]
        self._playing: dict[int, protocol.Environment] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[Any]] = set()
        self.under_way: dict[asyncio.Task[Any], tuple[CallEnvironment, float]] = {}  # deadline

    async def call(self, call: CallEnvironment) -> object:
        """The call's checked result, in time; raise EnvironmentFailure for anything else.

        An environment that failed is replaced, unless it just couldn't give its state.
        """
        if call.kind == "leave":
            self._leave(call.episode)
            return None
        try:
            return await self._result(call)
        except protocol.EnvironmentFailure:
            if call.kind != "get_state" and call.episode in self._playing:
                _retained(self._closing, _close(self._playing.pop(call.episode)))
            raise

    def _leave(self, episode: int) -> None:
        """Take an environment back; one that is still at work is stopped, and plays no other."""
        environment = self._playing.pop(episode, None)
        at_work = [task for task, (call, _) in self.under_way.items() if call.episode == episode]
        for task in at_work:
            task.cancel()
        if environment is not None and at_work:
            _retained(self._closing, _close(environment))
        elif environment is not None:
            self._idle.append(environment)

    async def close(self) -> None:
        """Cancel the calls under way, and close the environments that play nothing."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        idle, self._idle = self._idle, []
        await asyncio.gather(*map(_close, idle), *self._closing)

    async def _result(self, call: CallEnvironment) -> object:
        who = f"{self._name}: {call.kind}"
        task = _retained(self._tasks, self._run(call))
        self.under_way[task] = call, time.monotonic() + call.timeout_s
        await asyncio.wait({task}, timeout=call.timeout_s)
        del self.under_way[task]
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            words = f"{who} gave no answer within {call.timeout_s:g} s"
            raise protocol.EnvironmentFailure("deadline", words)
        if task.cancelled():
            raise protocol.EnvironmentFailure("raised", f"{who} was cancelled by its own code")
        error = task.exception()
        if isinstance(error, protocol.EnvironmentFailure):
            raise error
        if error is not None:
            raise protocol.EnvironmentFailure.of(who, error) from error
        result, observed = task.result(), call.kind in ("reset", "step")
        return protocol.checked_observation(who, result) if observed else result

    async def _run(self, call: CallEnvironment) -> object:
        if call.kind in ("reset", "set_state") and call.episode not in self._playing:
            self._playing[call.episode] = self._idle.pop() if self._idle else self._make()
        environment: Any = self._playing.get(call.episode)
        if environment is None:
            raise protocol.EnvironmentFailure(
                "lost", "the episode has no environment; reset it first"
            )
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


def _retained(
    tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, object]
) -> asyncio.Task[Any]:
    """A task of this loop, which itself holds no reference to it."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def _close(environment: protocol.Environment) -> None:
    """Close an environment that nobody plays with again, whatever it says to that."""
    with suppress(Exception, SystemExit, KeyboardInterrupt):
        await asyncio.wait_for(environment.close(), CLOSE_S)


# In the process. It is sent {"name": …, "options": …, "plugins": …, "blocking_s": …} first, and
# answers with the environment's tools and whether it is resumable; then calls.


class _Answer(NamedTuple):
    number: int  # of the call
    value: object  # an Observation, a state's bytes, None, or an EnvironmentFailure
    stuck: bool = False  # its code keeps the loop beyond its deadline (0: it was given up before)


class EnvironmentService:
    """Loads the environment's class, and answers calls."""

    def __init__(self, load: Mapping[str, Any], channel: Connection) -> None:
        name, options = load["name"], load["options"]
        try:
            if ":" not in name:
                import_plugins(load["plugins"])
            make = partial(protocol.make_environment, name, options)
            self._host = EnvironmentHost(f"environment {name!r}", make)
        except EngineError:
            raise
        except Exception as error:  # a user's class may fail in any way
            failure = protocol.EnvironmentFailure.of(f"environment {name!r}", error)
            raise ConfigError(f"{failure}; it must be made without an error") from error
        self.loaded = self._host.tools, self._host.resumable
        self._channel, self._blocking_s = channel, float(load["blocking_s"])
        self._tasks: set[asyncio.Task[Any]] = set()
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
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
        else:
            _retained(self._tasks, self._answer(call))

    async def _answer(self, call: CallEnvironment) -> None:
        try:
            value = await self._host.call(call)
        except protocol.EnvironmentFailure as failure:
            value = failure
        if call.kind != "leave":
            self._answers.put(_Answer(call.number, value))

    def _send(self) -> None:
        with suppress(OSError):  # the run is gone, which the loop sees as well
            while True:
                self._channel.send(self._answers.get())
                sys.stdout.flush()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report a loop that doesn't go on though the deadline of a call has passed."""
        while True:
            time.sleep(_TICK_S)
            alive, now = self._alive, time.monotonic()
            calls, running = self._host.under_way.copy(), asyncio.current_task(loop)
            blocked = now - alive > self._blocking_s
            if running is None or not (blocked or any(u <= now for _, u in calls.values())):
                continue
            call, until = calls.get(running, (None, now))
            if until > now and not blocked:
                continue
            time.sleep(_STUCK_S)
            if self._alive == alive:
                number = 0 if call is None else call.number
                self._answers.put(_Answer(number, None, stuck=True))
                return


# The run's side.


class _Pending(NamedTuple):
    """A call under way."""

    call: CallEnvironment
    until: float  # of `time.monotonic`
    future: Future[Any]


class EnvironmentProcess:
    """One process: calls under way, its deadlines, its restarts.

    It starts with the first call, and again with the next one after its end. A thread of its own
    sends and receives; everything below `_run` is that thread's.
    """

    def __init__(self, load: dict[str, Any]) -> None:
        self.episodes: set[int] = set()  # that are open
        self._load, self._who = load, f"environment {load['name']!r}"
        self._process = WorkerProcess(
            self._who, "engine.agents.environment_pool:EnvironmentService"
        )
        self._inbox: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._woken, self._wake = Pipe(duplex=False)
        self._waking = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._living: set[int] = set()  # episodes that the process knows
        self._numbers = itertools.count(1)
        self._heard = 0.0
        self._closed = False
        self._loaded: Future[tuple[list[dict[str, object]], bool]] = Future()
        self._start_error: Exception | None = None  # of the last start
        self._thread: threading.Thread | None = None

    def loaded(self) -> tuple[list[dict[str, object]], bool]:
        """Start the process; its environment's tools and whether it is resumable, or why not."""
        self._put(None)
        return self._loaded.result()

    def call(self, episode: int, timeout_s: float, kind: CallKind, value: object) -> Future[Any]:
        """Ask for a call; the future ends soon after `timeout_s` at the latest."""
        if kind == "leave":
            self.episodes.discard(episode)
        call = CallEnvironment(next(self._numbers), episode, kind, value, timeout_s)
        pending = _Pending(call, time.monotonic() + timeout_s + _GRACE_S, Future())
        pending.future.set_running_or_notify_cancel()  # nothing cancels it any more
        self._put(pending)
        return pending.future

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
            if pending is not None:
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
            pending.future.set_result(None)
            return
        if call.kind in ("step", "get_state") and call.episode not in self._living:
            self._fail(pending, "lost", "the episode's process ended for another episode's sake")
            return
        if not self._running():
            self._fail(pending, "crashed", f"its process can't be started ({self._start_error})")
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
        loaded: Any = None
        try:
            loaded, self._start_error = self._process.start(self._load), None
        except WorkerError as error:
            self._start_error = EpisodeError(str(error))
        except EngineError as error:
            self._start_error = error
        except Exception as error:  # options that can't be pickled; no more processes
            self._start_error = EpisodeError(f"{self._who} can't be started: {error}")
        if not self._loaded.done():  # somebody waits for it
            if self._start_error is None:
                self._loaded.set_result(loaded)
            else:
                self._loaded.set_exception(self._start_error)
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
                self._fail_all("crashed", f"its process {message.how}")
                continue
            assert isinstance(message, _Answer)
            if message.stuck:
                self._give_up([message.number])
            elif (pending := self._pending.pop(message.number, None)) is not None:
                self._answer(pending, message.value)

    def _answer(self, pending: _Pending, value: object) -> None:
        if not isinstance(value, protocol.EnvironmentFailure):
            pending.future.set_result(value)
            return
        if pending.call.kind != "get_state":  # it goes on
            self._living.discard(pending.call.episode)
        pending.future.set_exception(value)

    def _check_deadlines(self) -> None:
        """Give a process up that is late, and from which nothing has come for a while."""
        now = time.monotonic()
        late = [number for number, pending in self._pending.items() if pending.until <= now]
        if late and now - self._heard >= _GRACE_S:
            self._give_up(late)
            return
        for number in late:  # it is at work: look again
            self._pending[number] = self._pending[number]._replace(until=now + _GRACE_S)

    def _give_up(self, late: Sequence[int]) -> None:
        """End the process for the calls of these numbers; the others are lost with it."""
        self._process.end()
        self._living.clear()
        for number in late:
            if (pending := self._pending.pop(number, None)) is not None:
                words = f"gave no answer within {pending.call.timeout_s:g} s"
                self._fail(pending, "deadline", words)
        self._fail_all("lost", "its process was ended for another episode's sake")

    def _fail_all(self, cause: protocol.FailureCause, words: str) -> None:
        calls, self._pending = self._pending, {}
        for pending in calls.values():
            self._fail(pending, cause, words)

    def _fail(self, pending: _Pending, cause: protocol.FailureCause, words: str) -> None:
        if not pending.future.done():
            message = f"{self._who}: {pending.call.kind}: {words}"
            pending.future.set_exception(protocol.EnvironmentFailure(cause, message))


class EnvironmentPool(AbstractContextManager["EnvironmentPool"]):
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
        blocking_s: float = math.inf,
    ) -> None:
        """`plugins` are modules that may register the environment.

        `processes` of 0 are as many as cores, 8 at most; `timeout_s` is each call's deadline, and
        `blocking_s` how long one may keep its event loop, and so others' calls, from going on.
        """
        if timeout_s <= 0 or processes < 0:
            raise ConfigError(
                f"rollout.agent.call_timeout_s={timeout_s} and num_workers={processes}: give a "
                "time above 0, and 0 or more processes"
            )
        if protocol.environment_module(name) == "__main__":
            raise ConfigError(
                f"rollout.agent.environment.name={name!r} is defined in the program that runs, "
                "which its own process can't import; move it into a module"
            )
        self.timeout_s = timeout_s
        load: dict[str, Any] = {"name": name, "options": dict(options or {}), "plugins": plugins}
        load |= {"blocking_s": blocking_s}
        count = processes or min(_MOST_PROCESSES, os.cpu_count() or 1)
        self._processes = [EnvironmentProcess(load) for _ in range(count)]
        self._numbers = itertools.count(1)
        try:
            self.tools, self.resumable = self._processes[0].loaded()
        except BaseException:
            self.close()
            raise

    def open(self) -> OpenEpisode:
        """A place for one episode, in the process that has the fewest."""
        process, number = min(self._processes, key=lambda p: len(p.episodes)), next(self._numbers)
        process.episodes.add(number)
        return OpenEpisode(partial(process.call, number, self.timeout_s))

    def close(self) -> None:
        """End all processes and what they left behind; calls under way fail."""
        for process in self._processes:
            process.close()

    def __exit__(self, *_: object) -> None:
        self.close()
