"""Plays many episodes at once: their turns are sampled in one continuous batch.

When a turn ends, its action goes to the episode's environment; the stream decodes the others' turns
meanwhile. The answer's tokens are appended and the next turn is submitted, under a key of its own,
so that samples don't depend on who answers first.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from engine.agents.episode import Episode
from engine.agents.protocol import Environment, Observation, tool_schemas
from engine.errors import EngineError, RolloutError
from engine.rollout.stream import RolloutStream

_GATHER_S = 0.005  # that an idle stream waits for another answer to come with the one it has
_CLOSE_S = 5.0  # for environments to end

Row = Mapping[str, Any]  # of the data set
MakeEnvironment = Callable[[], Environment]


class EnvironmentThread:
    """A thread whose event loop awaits environments; a context manager that closes them."""

    def __init__(self, make: MakeEnvironment) -> None:
        """`make` is called in the thread, once for each environment that is needed at a time."""
        self._make = make
        self._idle: list[Environment] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()

    async def take(self) -> Environment:
        """An environment that plays no episode."""
        return self._idle.pop() if self._idle else self._make()

    async def give_back(self, environment: Environment) -> None:
        """Let another episode have it."""
        self._idle.append(environment)

    async def discard(self, environment: Environment) -> None:
        """Close one that failed; whatever it says to that."""
        with suppress(Exception):
            await asyncio.wait_for(environment.close(), _CLOSE_S)

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Close the environments that play nothing, and end the thread."""

        async def all_closed() -> None:
            idle, self._idle = self._idle, []
            await asyncio.gather(*(self.discard(one) for one in idle))

        if not self._thread.is_alive():
            return
        with suppress(TimeoutError):
            self.start(all_closed()).result(2 * _CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


class EpisodePlayer:
    """Plays episodes on a stream of one completion a request (`params.n` 1)."""

    def __init__(
        self,
        stream: RolloutStream,
        environments: EnvironmentThread,
        *,
        concurrency: int,
        call_seconds: float,
        failure_reward: float | None = None,
    ) -> None:
        """At most `concurrency` episodes at a time, each call of an environment with a deadline
        of `call_seconds`; `failure_reward`: see `Episode.fail`."""
        self._stream, self._environments = stream, environments
        self._concurrency, self._failure_reward = concurrency, failure_reward
        self._call_seconds = call_seconds
        self._playing = 0
        self._answers: SimpleQueue[tuple[Episode, Future[Observation]]] = SimpleQueue()
        self._owned: dict[int, Environment] = {}  # by id of the episode
        self._sampling: dict[Hashable, Episode] = {}  # by key of the turn

    def play(self, episodes: Sequence[Episode], rows: Sequence[Row]) -> None:
        """Play them to their ends; `rows[episode.row]` is what an episode begins from.

        No environment's fault raises: the episode ends as `failed`.
        """
        waiting = deque(episodes)
        while waiting or self._playing:
            while waiting and self._playing < self._concurrency:
                episode = waiting.popleft()
                episode.started = time.monotonic()
                self._playing += 1
                self._ask(episode, self._reset(episode, rows[episode.row]))
            answered = sorted(self._take_answers(), key=lambda one: (one[0].key, one[0].index))
            for episode, answer in answered:
                self._take_answer(episode, answer, rows[episode.row])
            if self._sampling:
                self._step()

    def _step(self) -> None:
        """Decode a token of each turn; what ended goes to its environment."""
        for done in self._stream.step():
            episode = self._sampling.pop(done.key)
            with self._faults_of(episode):
                action = episode.add_turn(done.completion)
                self._ask(episode, self._owned[id(episode)].step(action))

    def _ask(self, episode: Episode, call: Coroutine[Any, Any, Observation]) -> None:
        async def within_deadline() -> Observation:
            begun = time.monotonic()
            try:
                return await asyncio.wait_for(call, self._call_seconds)
            finally:
                episode.environment_seconds += time.monotonic() - begun

        future = self._environments.start(within_deadline())
        future.add_done_callback(lambda answer: self._answers.put((episode, answer)))

    async def _reset(self, episode: Episode, row: Row) -> Observation:
        environment = self._owned[id(episode)] = await self._environments.take()
        episode.tools = tool_schemas(environment)
        return await environment.reset(row)

    def _take_answers(self) -> Iterator[tuple[Episode, Future[Observation]]]:
        """What environments answered; without anything to decode, it waits for an answer.

        Raises RolloutError where none comes in time, as one of them blocks the others' thread.
        """
        wait = 0.0 if self._sampling else self._call_seconds + _CLOSE_S
        answered = False
        while True:
            try:
                yield self._answers.get(block=wait > 0.0, timeout=wait or None)
            except Empty:
                break
            answered, wait = True, 0.0 if self._sampling else _GATHER_S
        if not answered and not self._sampling and self._playing:
            raise RolloutError(
                f"{self._playing} episodes wait for their environments, and none has answered "
                f"within {self._call_seconds:g} s: one of them blocks its thread; await what takes "
                "long in it"
            )

    def _take_answer(self, episode: Episode, answer: Future[Observation], row: Row) -> None:
        with self._faults_of(episode):
            observation = _checked(answer.result())
            if episode.transcript is None:
                episode.begin(row["prompt"], observation)
            else:
                episode.observe(observation)
            turn = episode.next_turn(time.monotonic())
            if turn is not None:
                self._stream.submit(
                    turn.key,
                    turn.prompt_ids,
                    max_new_tokens=turn.max_new_tokens,
                    after=turn.after,
                )
                self._sampling[turn.key] = episode

    @contextmanager
    def _faults_of(self, episode: Episode) -> Iterator[None]:
        """What goes wrong with an episode ends it alone; one that is over gives up its place."""
        try:
            yield
        except TimeoutError:
            episode.fail(f"no answer within {self._call_seconds:g} s", self._failure_reward)
        except EngineError as error:
            episode.fail(str(error), self._failure_reward)
        except Exception as error:  # an environment is code of others
            episode.fail(f"{type(error).__name__}: {error}", self._failure_reward)
        if episode.end is not None:
            self._playing -= 1
            self._part(episode)
            if episode.latest_turn is not None:
                self._stream.forget(episode.latest_turn)

    def _part(self, episode: Episode) -> None:
        """Give back the environment of an episode that ended; one that failed is replaced."""
        environment = self._owned.pop(id(episode), None)
        if environment is None:
            return
        keep = episode.end != "failed"
        pool = self._environments
        pool.start(pool.give_back(environment) if keep else pool.discard(environment))


def _checked(observation: object) -> Observation:
    """An environment's answer; raises TypeError or ValueError for one that is none."""
    if not isinstance(observation, Observation):
        raise TypeError(f"the environment answered {type(observation).__name__}, no Observation")
    if not math.isfinite(observation.reward):
        raise ValueError(f"the environment's reward {observation.reward} is no finite number")
    for message in observation.messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"a message of the environment needs role and content: {message!r}")
    return observation
