"""Plays episodes of agents: their requests come from `endpoint`, their turns from a stream.

`AgentPool` runs them (`agent_runner`), each episode in one call that ends with its reward;
meanwhile its requests arrive beside other episodes' and are sampled in one continuous batch.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from engine.agents import agent_runner
from engine.agents.agent_loop import ActiveEpisode, EpisodePlayer, SampledTurn, open_pool
from engine.agents.endpoint import EpisodeSession, PolicyRequest, RecordingEndpoint
from engine.agents.environment_pool import OpenEpisode
from engine.agents.environment_protocol import EnvironmentFailure, Observation
from engine.agents.episode import EpisodeTree
from engine.agents.recorder import Replays
from engine.errors import EngineError
from engine.rollout.stream import RolloutStream

_STOPS_EVERY = 8  # steps of the stream between looks for texts that end a turn


class AgentPool:
    """Runs an agent in processes, or in this one, and has the endpoint that it talks to."""

    tools: Sequence[Mapping[str, object]] = ()  # each request has its own
    resumable = False  # an agent that was interrupted begins again, and its turns are replayed

    def __init__(
        self,
        name: str,
        options: Mapping[str, object],
        processes: int,
        timeout_s: float,
        blocking_s: float,
    ) -> None:
        """`timeout_s` is an episode's deadline; `processes` of 0: in this one.

        A function that awaits nothing for `blocking_s` seconds is too late, too, as it holds up
        the others in its process. Raises ConfigError for an agent that can't be loaded.
        """
        self.processes, self.timeout_s = processes, timeout_s
        agent = {"name": name, "options": dict(options)}
        self._open_pool = partial(
            open_pool, agent_runner.PROGRAM, agent, processes, timeout_s, blocking_s=blocking_s
        )
        self._pools = [self._open_pool()]
        try:
            self.endpoint = RecordingEndpoint()
        except BaseException:
            self._pools[0].close()
            raise

    def open(self) -> OpenEpisode:
        """A place for one episode."""
        return self._pools[0].open()

    def open_alone(self) -> OpenEpisode:
        """A place in a process of its own, as long as no more than `processes` are open."""
        if len(self._pools) < 2:
            self._pools.append(self._open_pool())
        return self._pools[1].open()

    def close(self) -> None:
        """End the endpoint and all processes."""
        self.endpoint.close()
        for pool in self._pools:
            pool.close()


class AgentPlayer(EpisodePlayer):
    """Plays episodes that agents drive, on a stream of one completion a request."""

    def __init__(self, stream: RolloutStream, agents: AgentPool, **options: Any) -> None:
        """Take the options of `EpisodePlayer`."""
        super().__init__(stream, agents, **options)
        self._agents, self._endpoint = agents, agents.endpoint
        self._sessions: dict[int, tuple[str, EpisodeSession]] = {}  # by id of the episode
        self._steps = 0
        # One of those in a process that ended has ended it: each plays alone, from its beginning.
        self._suspects: deque[ActiveEpisode] = deque()
        self._alone: set[ActiveEpisode] = set()

    def save(self, seconds: float) -> dict[int, EpisodeTree]:
        """What was recorded of the episodes that play, by id of the episode."""
        under_way = {partial.key: partial for partial in self._stream.partials()}
        by_episode: dict[int, Any] = {}
        for key, (playing, _) in self._sampling.items():
            if key in under_way and under_way[key].completions[0].token_ids:
                by_episode.setdefault(id(playing.episode), under_way[key])

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
        super().close()

    def _start(self, playing: ActiveEpisode) -> None:
        """Let the agent begin, with a key of its own; an episode's earlier turns are replayed."""
        episode, answers, saved = playing.episode, self._answers, playing.resumed
        replays = Replays(episode.transcript, saved.tokens if saved is not None else None)
        playing.resumed = None
        episode.restart()
        session = EpisodeSession(episode, lambda turn: answers.put((playing, turn)), replays)
        key = self._endpoint.open(session)
        self._sessions[id(episode)] = key, session
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
        if request.abandoned or request.session.closed:
            if (playing, request) == self._sampling.get(request.key):
                self._stream.cut(request.key)
            return
        while request.key in self._sampling:  # of two with the same seed, or of an abandoned one
            request.key = (request.key, "again")
        try:
            self._submit(playing, request)
        except EngineError as error:  # token ids that the model doesn't have, say
            self._endpoint.resolve([(request, error)])

    def _decode(self) -> None:
        self._steps += 1
        if self._steps % _STOPS_EVERY == 0:
            self._cut_at_stops()
        super()._decode()

    def _take_turns(self, ended: list[SampledTurn]) -> None:
        self._endpoint.resolve([(turn, sampled.part) for _, turn, sampled in ended])

    def _cut_at_stops(self) -> None:
        with_stops = {key: turn for key, (_, turn) in self._sampling.items() if turn.stops}
        for unfinished in self._stream.partials() if with_stops else ():
            if (turn := with_stops.get(unfinished.key)) is not None:
                playing, _ = self._sampling[turn.key]
                text = playing.episode.tokenizer.text(unfinished.completions[0].token_ids)
                if any(stop in text for stop in turn.stops):
                    self._stream.cut(turn.key)

    def _end(self, playing: ActiveEpisode, answer: Future[Observation]) -> None:
        """The agent has ended, failed, or was too late; its episode is over unless it was lost."""
        episode, error = playing.episode, answer.exception()
        key, session = self._sessions.pop(id(episode))
        self._endpoint.close_session(key)
        for turn_key, (other, _) in self._sampling.items():
            if other is playing:
                self._stream.cut(turn_key)
        for turn in session.recorder.turns:
            self._stream.forget(turn.key)
        if self._begins_again(playing, error):
            return
        episode.environment_seconds = max(
            0.0, time.monotonic() - episode.started - session.policy_seconds
        )
        session.finish(None if error is not None else answer.result(), error, self._failure_reward)
        episode.info["late_calls"], self._endpoint.late_calls = self._endpoint.late_calls, 0

    def _begins_again(self, playing: ActiveEpisode, error: BaseException | None) -> bool:
        """Whether an episode was lost with its process, and begins again."""
        was_alone = playing in self._alone
        self._alone.discard(playing)
        if was_alone:
            playing.environment.close()
        cause = error.cause if isinstance(error, EnvironmentFailure) else None
        lost = cause == "lost" and playing.restarts > 0
        suspect = cause == "crashed" and not was_alone and self._agents.processes > 0
        if lost:
            playing.restarts -= 1
            self._start(playing)
        elif suspect:
            self._suspects.append(playing)
        while self._suspects and len(self._alone) < self._agents.processes:
            suspected = self._suspects.popleft()
            suspected.environment.close()
            suspected.environment = self._agents.open_alone()
            self._alone.add(suspected)
            self._start(suspected)
        return lost or suspect
