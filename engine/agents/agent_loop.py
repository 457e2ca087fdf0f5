"""The agent loop: `EpisodePlayer` plays many episodes at once.

Their turns are sampled in one continuous batch. When a turn ends, its action goes to the episode's
environment; the stream decodes the others' turns meanwhile. The answer's tokens are appended and
the next turn is submitted, under a key of its own, so that samples don't depend on who answers
first. Weights may change between two steps: a turn goes on under the new ones, and every token
carries its version.

Environments in processes of their own are in `environment_pool`; `LocalEnvironments` are in this
one, for light ones that never block their thread.
"""

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
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from engine.agents import environment_pool
from engine.agents.environment_protocol import Environment, EnvironmentFailure, make_environment
from engine.agents.episode import (
    Episode,
    EpisodeTree,
    SavedTurn,
    TurnRequest,
    load_episode,
    save_episode,
)
from engine.errors import EngineError, RolloutError
from engine.rollout.stream import PartialRequest, RolloutStream, StreamedCompletion


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
        """End what plays, close the environments, and end the thread."""
        if not self._thread.is_alive():
            return
        with suppress(TimeoutError):
            closing = asyncio.run_coroutine_threadsafe(self.host.close(), self._loop)
            closing.result(2 * environment_pool.CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(environment_pool.CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


def open_pool(
    name: str, options: Mapping[str, object], processes: int, timeout_s: float, **limits: Any
) -> environment_pool.EnvironmentPool | LocalEnvironments:
    """Environments in processes, or in this one for 0; `limits` are an `EnvironmentPool`'s."""
    if not processes:
        make = partial(make_environment, name, options)
        return LocalEnvironments(make, timeout_s=timeout_s)
    return environment_pool.EnvironmentPool(
        name, options, processes=processes, timeout_s=timeout_s, **limits
    )


class Environments(Protocol):
    """What episodes are played with: `EnvironmentPool`, `LocalEnvironments`, or `AgentPool`."""

    @property
    def tools(self) -> Sequence[Mapping[str, object]]: ...  # JSON schemas, of every episode

    @property
    def resumable(self) -> bool: ...  # whether episodes can be saved between turns

    @property
    def timeout_s(self) -> float: ...  # deadline of a call, in seconds

    def open(self) -> environment_pool.OpenEpisode: ...

    def close(self) -> None: ...


log = logging.getLogger(__name__)

_GATHER_S = 0.005  # that an idle stream waits for another answer to come with the one it has
_LONGEST_GATHER_S = 0.1  # that it waits for more while they keep coming
_LATE_S = 30.0  # after its deadline, that an environment's answer or failure comes

Row = Mapping[str, Any]  # of the data set


@cache  # once a process
def _warn_of_long_prompts(length: int) -> None:
    log.warning(
        "an episode's prompt leaves less than data.max_response_length=%d tokens for its response; "
        "set data.max_prompt_length to the longest prompt that the environment makes", length
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class ActiveEpisode:
    """An episode with a place among those that play."""

    episode: Episode
    row: Row
    environment: environment_pool.OpenEpisode
    resumed: SavedTurn | None = None  # until its environment has the state that was saved
    restarts: int = 2  # left to it, where its process ends for another's sake


Answer = tuple[ActiveEpisode, Any]  # a call's future, or what else an episode waits for
SampledTurn = tuple[ActiveEpisode, TurnRequest, StreamedCompletion]


class EpisodePlayer:
    """Plays episodes on a stream of one completion a request (`params.n` 1)."""

    def __init__(
        self,
        stream: RolloutStream,
        environments: Environments,
        *,
        concurrency: int,
        failure_reward: float | None = None,
    ) -> None:
        """Play `concurrency` episodes at a time; `failure_reward` is that of `Episode.fail`."""
        self._stream, self._environments = stream, environments
        self._concurrency, self._failure_reward = concurrency, failure_reward
        self._waiting: deque[tuple[Episode, Row, SavedTurn | None]] = deque()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._open: dict[int, ActiveEpisode] = {}  # by id of the episode: those that play
        # By key of the turn, the oldest first.
        self._sampling: dict[Hashable, tuple[ActiveEpisode, TurnRequest]] = {}
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
            (playing, playing.environment.get_state()) for playing, _ in self._sampling.values()
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
        episode.started, episode.tools = time.monotonic(), self._environments.tools
        playing = ActiveEpisode(episode, row, self._environments.open(), resumed)
        self._open[id(episode)] = playing
        self._start(playing)

    def _start(self, playing: ActiveEpisode) -> None:
        if (resumed := playing.resumed) is None:
            self._ask(playing, playing.environment.reset(playing.row))
        else:
            playing.episode.started -= resumed.seconds
            self._ask(playing, playing.environment.set_state(resumed.environment))

    def _decode(self) -> None:
        """Cut turns that are late, and decode a token of each."""
        now = time.monotonic()
        for key, (playing, turn) in self._sampling.items():
            limit = playing.episode.limits.turn_seconds
            if limit is None or now - turn.submitted <= limit:
                break
            if not turn.late:
                turn.late = True
                self._stream.cut(key)
        self._take_turns([(*self._sampling.pop(ended.key), ended) for ended in self._stream.step()])

    def _take_turns(self, ended: list[SampledTurn]) -> None:
        """Send turns to their environments."""
        for playing, turn, sampled in ended:
            with self._faults_of(playing):
                playing.episode.cut = turn.late
                action = playing.episode.add_turn(sampled.completion)
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
        limit, seconds = self._environments.timeout_s, 0.0
        silence = limit + _LATE_S
        if idle and len(self._sampling) < len(self._open):
            seconds = silence if wait_s is None else wait_s
        first = 0.0  # when the first answer came
        while True:
            try:
                yield self._answers.get(block=seconds > 0.0, timeout=seconds or None)
            except Empty:
                break
            self._heard = time.monotonic()
            first = first or self._heard
            if self._heard - first > _LONGEST_GATHER_S:
                break
            seconds = 0.0 if self._sampling else _GATHER_S
        stuck = self._open and not self._sampling and time.monotonic() - self._heard >= silence
        if not first and stuck:
            raise RolloutError(
                f"{len(self._open)} episodes wait for their environments, and none has answered "
                f"within {limit:g} s: one of them blocks its thread; await what takes "
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
                    self._start(playing)
                    return
            elif self._restarted(playing, answer.exception()):
                return
            elif episode.transcript is None:
                episode.begin(playing.row["prompt"], answer.result())
                assert episode.transcript is not None
                response, longest = episode.limits.max_response_length, episode.limits.max_model_len
                if len(episode.transcript.ids) + response > longest:
                    _warn_of_long_prompts(response)
            else:
                episode.observe(answer.result())
            saved = resumed.tokens if resumed is not None else None
            if (turn := episode.next_turn(time.monotonic(), saved)) is not None:
                self._submit(playing, turn)

    def _restarted(self, playing: ActiveEpisode, error: BaseException | None) -> bool:
        """Restart an episode that was lost through no fault of its environment."""
        lost = isinstance(error, EnvironmentFailure) and error.cause == "lost"
        if not lost or not playing.restarts:
            return False
        if playing.episode.latest_turn is not None:
            self._stream.forget(playing.episode.latest_turn)
        playing.restarts -= 1
        playing.episode.restart()
        self._start(playing)
        return True

    def _submit(self, playing: ActiveEpisode, turn: TurnRequest) -> None:
        resume = None
        if turn.partial is not None:
            resume = PartialRequest(turn.key, turn.prompt_ids, [turn.partial])
        self._stream.submit(
            turn.key, turn.prompt_ids, resume, max_new_tokens=turn.max_new_tokens, after=turn.after
        )
        turn.submitted = time.monotonic()
        self._sampling[turn.key] = playing, turn

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
