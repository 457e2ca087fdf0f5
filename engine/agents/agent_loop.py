"""The agent loop: `EpisodePlayer` plays many episodes at once.

Their turns are sampled in one continuous batch. When a turn ends, its action goes to the episode's
environment; the stream decodes the others' turns meanwhile. The answer's tokens are appended and
the next turn is submitted, under a key of its own, so that samples don't depend on who answers
first. Weights may change between two steps: a turn goes on under the new ones, and every token
carries its version.

Environments in processes of their own are in `environment_pool`; `LocalEnvironments` are in this
one, for light ones that never block their thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from engine.agents import environment_pool
from engine.agents.environment_protocol import Environment, EnvironmentFailure
from engine.agents.episode import Episode, EpisodeTree, SavedTurn, load_episode, save_episode
from engine.errors import EngineError, RolloutError
from engine.rollout.stream import PartialCompletion, PartialRequest, RolloutStream


class LocalEnvironments:
    """Environments that the event loop of a thread of this process awaits."""

    def __init__(self, make: Callable[[], Environment], *, timeout_s: float = 30.0) -> None:
        """`make` is called whenever all are playing; `timeout_s` is each call's deadline."""
        self.host = environment_pool.EnvironmentHost("the environment", make)
        self.timeout_s = timeout_s
        self.tools, self.resumable = self.host.tools, self.host.resumable
        self._numbers = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()

    def open(self) -> environment_pool.OpenEpisode:
        """A place for one episode."""
        return environment_pool.OpenEpisode(partial(self._call, next(self._numbers)))

    def _call(self, episode: int, kind: environment_pool.CallKind, value: object) -> Future[Any]:
        call = environment_pool.CallEnvironment(0, episode, kind, value, self.timeout_s)
        return asyncio.run_coroutine_threadsafe(self.host.call(call), self._loop)

    def close(self) -> None:
        """Close the environments that play nothing, and end the thread."""
        if not self._thread.is_alive():
            return
        with suppress(TimeoutError):
            closing = asyncio.run_coroutine_threadsafe(self.host.close(), self._loop)
            closing.result(2 * environment_pool.CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(environment_pool.CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


class Environments(Protocol):
    """What episodes are played with: `EnvironmentPool`, `LocalEnvironments`, or agents."""

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """JSON schemas, the same for every episode."""

    @property
    def resumable(self) -> bool:
        """Whether episodes can be saved between turns."""

    def open(self) -> environment_pool.OpenEpisode:
        """A place for one episode."""

    def close(self) -> None:
        """End what runs them."""


log = logging.getLogger(__name__)

_GATHER_S = 0.005  # that an idle stream waits for another answer to come with the one it has
RESTARTS = 2  # of an episode whose process ended for another's sake
_LATE_S = 30.0  # after its deadline, that an environment's answer or failure comes

Row = Mapping[str, Any]  # of the data set


@dataclass(slots=True, eq=False)
class ActiveEpisode:
    """An episode with a place among those that play."""

    episode: Episode
    row: Row
    environment: environment_pool.OpenEpisode
    resumed: SavedTurn | None = None  # until its environment has the state that was saved
    submitted: float = 0.0  # when its turn was, of time.monotonic
    restarts: int = 0


Answer = tuple[ActiveEpisode, Any]  # a call's future, or what else an episode waits for


class EpisodePlayer:
    """Plays episodes on a stream of one completion a request (`params.n` 1)."""

    _warned = False  # by this process, of prompts that are too long

    def __init__(
        self,
        stream: RolloutStream,
        environments: Environments,
        *,
        concurrency: int,
        call_seconds: float,
        failure_reward: float | None = None,
    ) -> None:
        """At most `concurrency` episodes at a time. `call_seconds` is the deadline that the
        environments keep; `failure_reward`: see `Episode.fail`."""
        self._stream, self._environments = stream, environments
        self._concurrency, self._failure_reward = concurrency, failure_reward
        self._call_seconds = call_seconds
        self._waiting: deque[tuple[Episode, Row, SavedTurn | None]] = deque()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._open: dict[int, ActiveEpisode] = {}  # by id of the episode: those that play
        self._sampling: dict[Hashable, ActiveEpisode] = {}  # by key of the turn
        self._ended: list[Episode] = []
        self._heard = 0.0  # when an environment was asked, or answered, last

    @property
    def busy(self) -> int:
        """Episodes that play, or wait for a place."""
        return len(self._waiting) + len(self._open) + len(self._ended)

    def play(self, episodes: Sequence[Episode], rows: Sequence[Row]) -> None:
        """Play them to their ends; `rows[episode.row]` is what an episode begins from.

        No environment's fault raises: the episode ends as `failed`.
        """
        for episode in episodes:
            self.add(episode, rows[episode.row])
        try:
            while self.busy:
                self.step()
        finally:
            self.close()

    def add(self, episode: Episode, row: Row, saved: EpisodeTree | None = None) -> None:
        """Play an episode as soon as there is a place for it.

        `saved`, of `save`, goes on where it was; one without its environment's state restarts.
        """
        turn = None if saved is None else load_episode(episode, saved)
        if episode.end is not None:
            self._ended.append(episode)
        else:
            self._waiting.append((episode, row, turn))

    def step(self, wait_s: float | None = None) -> list[Episode]:
        """Take what environments answered, decode a token of each turn; return what ended.

        With nothing to decode it waits for an answer, `wait_s` seconds (None: as it takes).
        Raises RolloutError where none comes, as one of them blocks the others' thread.
        """
        while self._waiting and len(self._open) < self._concurrency:
            self._begin(*self._waiting.popleft())
        self._take_answers(wait_s)
        if self._sampling:
            self._decode()
        ended, self._ended = self._ended, []
        return ended

    def save(self, seconds: float) -> dict[int, EpisodeTree]:
        """What plays and can go on elsewhere, by id of the episode; it goes on here, too.

        Environments have `seconds` to answer and to give their states. Without one an episode is
        not among them.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and len(self._sampling) < len(self._open):
            self._take_answers(left, idle=True)
        if not self._environments.resumable:
            return {}
        state_calls = [
            (playing, playing.environment.get_state()) for playing in self._sampling.values()
        ]
        wait([call for _, call in state_calls], max(0.0, until - time.monotonic()))
        partials = {partial.key: partial for partial in self._stream.partials()}
        trees: dict[int, EpisodeTree] = {}
        for key, (playing, call) in zip(list(self._sampling), state_calls, strict=True):
            error = call.exception() if call.done() else TimeoutError("no state came in time")
            if error is not None:
                log.warning("an episode would restart from a checkpoint: %s", error)
                continue
            partial = partials.get(key)
            turn = partial.completions[0] if partial is not None else None
            trees[id(playing.episode)] = save_episode(playing.episode, call.result(), turn)
        return trees

    def close(self) -> None:
        """Drop what plays and give the environments back; the stream is the caller's."""
        self._waiting.clear()
        for playing in self._open.values():
            playing.environment.close()
        self._open.clear()
        self._sampling.clear()

    def _begin(self, episode: Episode, row: Row, resumed: SavedTurn | None) -> None:
        now = time.monotonic()
        episode.started, episode.tools = now, self._environments.tools
        playing = ActiveEpisode(episode, row, self._environments.open(), resumed)
        self._open[id(episode)] = playing
        if resumed is None:
            self._ask(playing, playing.environment.reset(row))
        else:
            episode.started -= resumed.seconds
            self._ask(playing, playing.environment.set_state(resumed.environment))

    def _decode(self) -> None:
        """Cut turns that are late, and decode a token of each; ended ones go to environments."""
        now = time.monotonic()
        for key, playing in self._sampling.items():  # the oldest first
            limit = playing.episode.limits.turn_seconds
            if limit is None or now - playing.submitted <= limit:
                break
            if not playing.episode.cut:
                playing.episode.cut = True
                self._stream.cut(key)
        for done in self._stream.step():
            playing = self._sampling.pop(done.key)
            with self._faults_of(playing):
                action = playing.episode.add_turn(done.completion)
                self._ask(playing, playing.environment.step(action))

    def _ask(self, playing: ActiveEpisode, call: Future[Any]) -> None:
        start = self._heard = time.monotonic()

        def answered(answer: Future[Any]) -> None:
            playing.episode.environment_seconds += time.monotonic() - start
            self._answers.put((playing, answer))

        call.add_done_callback(answered)

    def _take_answers(self, wait_s: float | None, idle: bool = False) -> None:
        """Take what environments answered; without anything to decode (`idle`), wait for it."""
        arriving = self._arriving(wait_s, idle or not self._sampling)
        answers = sorted(arriving, key=lambda a: (a[0].episode.key, a[0].episode.index))
        for playing, answer in answers:
            if id(playing.episode) in self._open:
                self._take_answer(playing, answer)

    def _arriving(self, wait_s: float | None, idle: bool) -> Iterator[Answer]:
        silence = self._call_seconds + _LATE_S
        seconds = 0.0
        if idle and len(self._sampling) < len(self._open):
            seconds = silence if wait_s is None else wait_s
        answered = False
        while True:
            try:
                yield self._answers.get(block=seconds > 0.0, timeout=seconds or None)
            except Empty:
                break
            self._heard, answered = time.monotonic(), True
            seconds = 0.0 if self._sampling else _GATHER_S
        stuck = self._open and not self._sampling and time.monotonic() - self._heard >= silence
        if not answered and stuck:
            raise RolloutError(
                f"{len(self._open)} episodes wait for their environments, and none has answered "
                f"within {self._call_seconds:g} s: one of them blocks its thread; await what takes "
                "long in it, or run environments in processes (rollout.agent.num_workers)"
            )

    def _take_answer(self, playing: ActiveEpisode, answer: Future[Any]) -> None:
        episode, resumed = playing.episode, playing.resumed
        playing.resumed = None
        with self._faults_of(playing):
            if resumed is not None:
                if answer.exception() is not None:
                    log.warning("an episode restarts: %s", answer.exception())
                    episode.restart()
                    self._ask(playing, playing.environment.reset(playing.row))
                    return
            elif self._restarted(playing, answer.exception()):
                return
            elif episode.transcript is None:
                episode.begin(playing.row["prompt"], answer.result())
                self._warn_of_length(episode)
            else:
                episode.observe(answer.result())
            self._submit(playing, resumed.tokens if resumed is not None else None)

    def _restarted(self, playing: ActiveEpisode, error: BaseException | None) -> bool:
        """Restart an episode that was lost through no fault of its environment."""
        lost = isinstance(error, EnvironmentFailure) and error.cause == "lost"
        if not lost or playing.restarts >= RESTARTS:
            return False
        if playing.episode.latest_turn is not None:
            self._stream.forget(playing.episode.latest_turn)
        playing.restarts += 1
        playing.episode.restart()
        self._ask(playing, playing.environment.reset(playing.row))
        return True

    @classmethod
    def _warn_of_length(cls, episode: Episode) -> None:
        """Warn, once, of a prompt that leaves less than the whole response."""
        limits = episode.limits
        assert episode.transcript is not None
        prompt, limit = len(episode.transcript.ids), limits.max_model_len
        if prompt + limits.max_response_length > limit and not cls._warned:
            cls._warned = True
            log.warning(
                "an episode begins with %d tokens, which leaves %d of %d for its response; set "
                "data.max_prompt_length to the longest prompt that the environment makes",
                *(prompt, max(0, limit - prompt), limits.max_response_length),
            )

    def _submit(self, playing: ActiveEpisode, tokens: PartialCompletion | None) -> None:
        """Have the next turn sampled, if the episode may have one."""
        turn = playing.episode.next_turn(time.monotonic())
        if turn is None:
            return
        partial = None
        if tokens is not None and len(tokens.token_ids) < turn.max_new_tokens:
            partial = PartialRequest(turn.key, turn.prompt_ids, [tokens])
        self._stream.submit(
            turn.key, turn.prompt_ids, partial, max_new_tokens=turn.max_new_tokens, after=turn.after
        )
        self._sampling[turn.key] = playing
        playing.submitted = time.monotonic()

    @contextmanager
    def _faults_of(self, playing: ActiveEpisode) -> Iterator[None]:
        """What goes wrong with an episode ends it alone; one that is over gives up its place."""
        episode = playing.episode
        try:
            yield
        except EngineError as error:
            episode.fail(str(error), self._failure_reward)
        except Exception as error:  # a parser, a template: code of others
            episode.fail(f"{type(error).__name__}: {error}", self._failure_reward)
        if episode.end is not None:
            self._open.pop(id(episode)).environment.close()
            self._ended.append(episode)
            if episode.latest_turn is not None:
                self._stream.forget(episode.latest_turn)
