"""Plays many episodes at once: their turns are sampled in one continuous batch.

When a turn ends, its action goes to the episode's environment; the stream decodes the others' turns
meanwhile. The answer's tokens are appended and the next turn is submitted, under a key of its own,
so that samples don't depend on who answers first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from engine.agents.episode import Episode
from engine.agents.local_environments import Environments, OpenEpisode
from engine.agents.protocol import Observation
from engine.errors import EngineError, RolloutError
from engine.rollout.stream import RolloutStream

_GATHER_S = 0.005  # that an idle stream waits for another answer to come with the one it has
_LATE_S = 30.0  # after its deadline, that an environment's answer or failure comes

Row = Mapping[str, Any]  # of the data set
Answer = tuple[Episode, Future[Observation], float]  # when it was asked, of time.monotonic


class EpisodePlayer:
    """Plays episodes on a stream of one completion a request (`params.n` 1)."""

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
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._open: dict[int, OpenEpisode] = {}  # by id of the episode: those that play
        self._sampling: dict[Hashable, Episode] = {}  # by key of the turn

    def play(self, episodes: Sequence[Episode], rows: Sequence[Row]) -> None:
        """Play them to their ends; `rows[episode.row]` is what an episode begins from.

        No environment's fault raises: the episode ends as `failed`.
        """
        waiting = deque(episodes)
        try:
            while waiting or self._open:
                while waiting and len(self._open) < self._concurrency:
                    self._begin(waiting.popleft(), rows)
                answered = sorted(self._take_answers(), key=lambda one: (one[0].key, one[0].index))
                for episode, answer, _ in answered:
                    self._take_answer(episode, answer, rows[episode.row])
                if self._sampling:
                    self._step()
        finally:
            for seat in self._open.values():
                seat.close()

    def _begin(self, episode: Episode, rows: Sequence[Row]) -> None:
        episode.started, episode.tools = time.monotonic(), self._environments.tools
        seat = self._open[id(episode)] = self._environments.open()
        self._ask(episode, seat.reset(rows[episode.row]))

    def _step(self) -> None:
        """Decode a token of each turn; what ended goes to its environment."""
        for done in self._stream.step():
            episode = self._sampling.pop(done.key)
            with self._faults_of(episode):
                action = episode.add_turn(done.completion)
                self._ask(episode, self._open[id(episode)].step(action))

    def _ask(self, episode: Episode, call: Future[Observation]) -> None:
        begun = time.monotonic()

        def answered(answer: Future[Observation]) -> None:
            episode.environment_seconds += time.monotonic() - begun
            self._answers.put((episode, answer, begun))

        call.add_done_callback(answered)

    def _take_answers(self) -> Iterator[Answer]:
        """What environments answered; without anything to decode, it waits for an answer.

        Raises RolloutError where none comes, as one of them blocks the others' thread.
        """
        wait = 0.0 if self._sampling else self._call_seconds + _LATE_S
        answered = False
        while True:
            try:
                yield self._answers.get(block=wait > 0.0, timeout=wait or None)
            except Empty:
                break
            answered, wait = True, 0.0 if self._sampling else _GATHER_S
        if not answered and not self._sampling:
            raise RolloutError(
                f"{len(self._open)} episodes wait for their environments, and none has answered "
                f"within {self._call_seconds:g} s: one of them blocks its thread; await what takes "
                "long in it, or run environments in processes (rollout.agent.num_workers)"
            )

    def _take_answer(self, episode: Episode, answer: Future[Observation], row: Row) -> None:
        with self._faults_of(episode):
            observation = answer.result()
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
        except EngineError as error:
            episode.fail(str(error), self._failure_reward)
        except Exception as error:  # a parser, a template: code of others
            episode.fail(f"{type(error).__name__}: {error}", self._failure_reward)
        if episode.end is not None:
            self._open.pop(id(episode)).close()
            if episode.latest_turn is not None:
                self._stream.forget(episode.latest_turn)
