"""Plays episodes of agents: their requests come from `endpoint`, their turns from a stream.

`Agents` runs them (`agent_runner`), each episode in one call that ends with its reward; meanwhile
its requests arrive beside other episodes' and are sampled in one continuous batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from engine.agents import agent_runner
from engine.agents.agent_loop import (
    RESTARTS,
    ActiveEpisode,
    EpisodePlayer,
    LocalEnvironments,
    Row,
)
from engine.agents.endpoint import EpisodeSession, PolicyRequest, RecordingEndpoint
from engine.agents.environment_pool import EnvironmentPool, OpenEpisode
from engine.agents.environment_protocol import EnvironmentFailure, Observation, make_environment
from engine.agents.episode import Episode, EpisodeTree, load_episode
from engine.agents.recorder import Replays
from engine.errors import EngineError
from engine.rollout.stream import PartialCompletion, RolloutStream

_STOPS_EVERY = 8  # steps of the stream between looks for texts that end a turn


class Agents:
    """Runs an agent in processes, or in this one, and has the endpoint that it talks to."""

    tools: Sequence[Mapping[str, object]] = ()  # each request has its own
    resumable = False  # an agent that was interrupted begins again, and its turns are replayed

    def __init__(
        self,
        name: str,
        options: Mapping[str, object],
        *,
        processes: int,
        timeout_s: float,
        blocking_s: float,
    ) -> None:
        """`timeout_s` is an episode's deadline; `processes` of 0: in this one.

        A function that awaits nothing for `blocking_s` seconds is too late, too, as it holds up
        the others in its process. Raises ConfigError for an agent that can't be loaded.
        """
        given = {"name": name, "options": dict(options)}
        self.processes = processes
        self._pool = partial(
            EnvironmentPool,
            agent_runner.PROGRAM,
            given,
            processes=processes,
            timeout_s=timeout_s,
            blocking_s=blocking_s,
        )
        self._alone: EnvironmentPool | None = None
        self._runners: EnvironmentPool | LocalEnvironments
        if processes:
            self._runners = self._pool()
        else:
            make = partial(make_environment, agent_runner.PROGRAM, given)
            self._runners = LocalEnvironments(make, timeout_s=timeout_s)
        try:
            self.endpoint = RecordingEndpoint()
        except BaseException:
            self._runners.close()
            raise

    def open(self) -> OpenEpisode:
        """A place for one episode."""
        return self._runners.open()

    def open_alone(self) -> OpenEpisode:
        """A place in a process of its own, as long as no more than `processes` are open."""
        if self._alone is None:
            self._alone = self._pool()
        return self._alone.open()

    def close(self) -> None:
        """End the endpoint and all processes."""
        self.endpoint.close()
        self._runners.close()
        if self._alone is not None:
            self._alone.close()


class AgentPlayer(EpisodePlayer):
    """Plays episodes that agents drive, on a stream of one completion a request."""

    def __init__(
        self,
        stream: RolloutStream,
        agents: Agents,
        *,
        concurrency: int,
        call_seconds: float,
        failure_reward: float | None = None,
    ) -> None:
        """As `EpisodePlayer`; `call_seconds` is the deadline of a whole episode."""
        self._agents = agents
        super().__init__(
            stream,
            agents,
            concurrency=concurrency,
            call_seconds=call_seconds,
            failure_reward=failure_reward,
        )
        self._endpoint = agents.endpoint
        self._sessions: dict[int, tuple[str, EpisodeSession]] = {}  # by id of the episode
        self._replays: dict[int, Replays] = {}  # of episodes that were interrupted
        self._requests: dict[Hashable, PolicyRequest] = {}  # that are sampled
        self._steps = 0
        # One of those in a process that ended has ended it: each plays alone, from its beginning.
        self._suspects: deque[tuple[ActiveEpisode, Replays]] = deque()
        self._alone: set[int] = set()  # ids of the episodes that play alone

    def add(self, episode: Episode, row: Row, saved: EpisodeTree | None = None) -> None:
        """Play an episode; one that was `saved` begins again, with its turns as they were."""
        if saved is not None:
            turn = load_episode(episode, saved)
            if turn is not None:
                self._replays[id(episode)] = Replays(episode.transcript, turn.tokens)
                episode.restart()
        if episode.end is not None:
            self._ended.append(episode)
        else:
            self._waiting.append((episode, row, None))

    def save(self, seconds: float) -> dict[int, EpisodeTree]:
        """What was recorded of the episodes that play, by id of the episode."""
        under_way = {partial.key: partial for partial in self._stream.partials()}
        by_episode: dict[int, Any] = {}
        for key, request in self._requests.items():
            if key in under_way and under_way[key].completions[0].token_ids:
                by_episode.setdefault(id(request.session.episode), under_way[key])

        def saved() -> dict[int, EpisodeTree]:
            trees = {
                number: session.recorder.saved(session.episode, by_episode.get(number))
                for number, (_, session) in self._sessions.items()
            }
            return {number: tree for number, tree in trees.items() if tree is not None}

        return self._endpoint.call(saved)

    def close(self) -> None:
        for key, _ in self._sessions.values():
            self._endpoint.close_session(key)
        self._sessions.clear()
        self._requests.clear()
        super().close()

    def _begin(self, episode: Episode, row: Row, resumed: object) -> None:
        episode.started = time.monotonic()
        playing = ActiveEpisode(episode, row, self._environments.open())
        self._open[id(episode)] = playing
        self._run(playing, self._replays.pop(id(episode), Replays()))

    def _run(self, playing: ActiveEpisode, replays: Replays) -> None:
        """Let the agent begin, with a key of its own."""
        answers = self._answers
        session = EpisodeSession(
            playing.episode, lambda request: answers.put((playing, request)), replays
        )
        key = self._endpoint.open(session)
        self._sessions[id(playing.episode)] = key, session
        row = {**playing.row, agent_runner.ENDPOINT: (self._endpoint.url, key)}
        self._ask(playing, playing.environment.reset(row))

    def _take_answer(self, playing: ActiveEpisode, answer: Any) -> None:
        if isinstance(answer, PolicyRequest):
            self._take_request(playing, answer)
        else:
            with self._faults_of(playing):
                self._end(playing, answer)

    def _take_request(self, playing: ActiveEpisode, request: PolicyRequest) -> None:
        """Have a turn sampled; one that nobody waits for any more ends with its next token."""
        if request.gone:
            if self._requests.get(request.key) is request:
                self._stream.cut(request.key)
            return
        while request.key in self._requests:  # of two that have the same seed, or that was left
            request.key = (*request.key, "again")
        try:
            self._stream.submit(
                request.key,
                request.prompt_ids,
                request.partial(),
                max_new_tokens=request.max_new_tokens,
                after=request.after,
            )
        except EngineError as error:  # token ids that the model doesn't have, say
            self._endpoint.resolve([(request, error)])
            return
        request.submitted = time.monotonic()
        self._requests[request.key], self._sampling[request.key] = request, playing

    def _decode(self) -> None:
        """Cut turns that are late or have their end, and decode a token of each."""
        now = time.monotonic()
        for key, request in self._requests.items():
            limit = request.session.episode.limits.turn_seconds
            if limit is None or now - request.submitted <= limit:
                break  # the oldest first
            if not request.late:
                request.late = True
                self._stream.cut(key)
        self._steps += 1
        if self._steps % _STOPS_EVERY == 0:
            self._cut_at_stops()
        done = []
        for ended in self._stream.step():
            del self._sampling[ended.key]
            request, completion = self._requests.pop(ended.key), ended.completion
            ids = completion.token_ids
            versions = completion.token_versions or [completion.policy_version] * len(ids)
            done.append((request, PartialCompletion(0, ids, completion.log_probs, versions)))
        self._endpoint.resolve(done)

    def _cut_at_stops(self) -> None:
        if not any(request.stops for request in self._requests.values()):
            return
        for unfinished in self._stream.partials():
            request = self._requests.get(unfinished.key)
            if request is not None and request.stops:
                text = request.session.episode.tokenizer.text(unfinished.completions[0].token_ids)
                if any(stop in text for stop in request.stops):
                    self._stream.cut(request.key)

    def _end(self, playing: ActiveEpisode, answer: Future[Observation]) -> None:
        """The agent has ended, failed, or was too late; its episode is over unless it was lost."""
        episode, error = playing.episode, answer.exception()
        key, session = self._sessions.pop(id(episode))
        self._endpoint.close_session(key)
        for turn in session.recorder.turns:
            self._stream.forget(turn.key)
        if self._begins_again(playing, error, Replays(episode.transcript)):
            return
        episode.environment_seconds = max(
            0.0, time.monotonic() - episode.started - session.policy_seconds
        )
        session.finish(None if error is not None else answer.result(), error, self._failure_reward)
        episode.info["late_calls"], self._endpoint.late_calls = self._endpoint.late_calls, 0

    def _begins_again(
        self, playing: ActiveEpisode, error: BaseException | None, replays: Replays
    ) -> bool:
        """Whether an episode was lost with its process, and begins again."""
        number, was_alone = id(playing.episode), id(playing.episode) in self._alone
        self._alone.discard(number)
        if was_alone:
            playing.environment.close()
        cause = error.cause if isinstance(error, EnvironmentFailure) else None
        lost = cause == "lost" and playing.restarts < RESTARTS
        suspect = cause == "crashed" and not was_alone and self._agents.processes > 0
        if lost or suspect:
            playing.restarts += lost
            playing.episode.restart()
        if lost:
            self._run(playing, replays)
        elif suspect:
            self._suspects.append((playing, replays))
        while self._suspects and len(self._alone) < self._agents.processes:
            suspected, replays = self._suspects.popleft()
            suspected.environment.close()
            suspected.environment = self._agents.open_alone()
            self._alone.add(id(suspected.episode))
            self._run(suspected, replays)
        return lost or suspect
