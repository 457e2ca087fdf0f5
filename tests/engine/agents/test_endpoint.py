"""The endpoint beside its player: places, ends, and turns that nobody waits for any more."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import psutil
import pytest
from transformers import PreTrainedTokenizerBase

from engine.agents import endpoint, environment_pool
from engine.agents.agent_loop import LocalEnvironments
from engine.agents.agent_player import AgentPlayer, AgentPool
from engine.agents.agent_runner import ENDPOINT
from engine.agents.endpoint import EpisodeSession, PolicyRequest, RecordingEndpoint
from engine.agents.environment_protocol import Observation
from engine.agents.episode import (
    Episode,
    EpisodeLimits,
    EpisodeTokenizer,
    EpisodeTree,
    plain_action,
)
from engine.data.tokenizer import load_tokenizer
from engine.errors import EngineError, RolloutError
from engine.rollout.protocol import Completion
from engine.rollout.stream import PartialCompletion, StreamedCompletion

ASK_7 = {"role": "user", "content": "3+4="}
ASK = {"messages": [{"role": "user", "content": "2+3="}], "max_tokens": 4}


class Served:
    """An endpoint with one episode, whose requests the test answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.turns: SimpleQueue[PolicyRequest] = SimpleQueue()
        stops = [int(tokenizer.eos_token_id)]  # type: ignore[arg-type]
        made = EpisodeTokenizer(tokenizer, stops, plain_action)
        episode = Episode(0, 0, 0, made, EpisodeLimits(40, 60), [1])
        self.session = EpisodeSession(episode, self.turns.put)
        self.endpoint = RecordingEndpoint()
        self.key = self.endpoint.open(self.session)

    def ask(self, body: Any = ASK, key: str | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.key}"}
        return httpx.post(
            f"{self.endpoint.url}/chat/completions", json=body, headers=headers, timeout=30.0
        )


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_folder)


@pytest.fixture
def served(tokenizer: PreTrainedTokenizerBase) -> Iterator[Served]:
    made = Served(tokenizer)
    yield made
    made.endpoint.close()


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    assert true()


def test_an_episode_that_floods_requests_waits_and_ends_alone(served: Served) -> None:
    places = endpoint._CONCURRENT_REQUESTS
    with ThreadPoolExecutor(places + 6) as clients:
        calls = [clients.submit(served.ask) for _ in range(places + 6)]
        wait_until(lambda: served.turns.qsize() == places)
        time.sleep(0.3)
        assert served.turns.qsize() == places
        served.endpoint.close_session(served.key)
        assert [call.result().status_code for call in calls] == [410] * len(calls)
    assert served.session.abandoned == places
    assert served.endpoint.late_calls == 0
    assert served.ask().status_code == 410
    assert served.endpoint.late_calls == 1
    assert served.ask(key="sk-of-another").status_code == 401


def test_a_turn_that_comes_as_the_episode_ends_is_not_recorded(served: Served) -> None:
    with ThreadPoolExecutor(1) as client:
        call = client.submit(served.ask)
        turn = served.turns.get(timeout=20.0)

        def answer_and_end() -> None:
            turn.done.set_result(PartialCompletion(0, [5, 6], [-1.0, -1.0], [0, 0]))
            served.session.close()

        served.endpoint.call(answer_and_end)
        assert call.result().status_code == 410
    assert served.session.recorder.turns == []


@pytest.mark.parametrize("whole", [True, False])
def test_a_late_turn_ends_the_episode_unless_it_had_its_end(
    served: Served, tokenizer: PreTrainedTokenizerBase, whole: bool
) -> None:
    [token] = tokenizer.encode("7", add_special_tokens=False)
    last = served.session.episode.tokenizer.stop_ids[0] if whole else token
    with ThreadPoolExecutor(1) as client:
        call = client.submit(served.ask)
        turn = served.turns.get(timeout=20.0)
        turn.late = True
        part = PartialCompletion(0, [token, last], [-1.0, -1.0], [0, 0])
        served.endpoint.resolve([(turn, part)])
        assert call.result().status_code == 200
        again = client.submit(served.ask, {**ASK, "seed": 1})
        if whole:
            served.endpoint.resolve([(served.turns.get(timeout=20.0), part)])
        else:
            assert again.result().json()["error"]["code"] == "episode_turn_seconds"
        assert again.result().status_code == (200 if whole else 400)
    assert served.session.limit == (None if whole else "turn_seconds")


def test_a_loop_that_is_held_up_is_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.ask({}).status_code == 400
    monkeypatch.setattr(endpoint, "_LOOP_S", 0.1)
    with pytest.raises(RolloutError, match="has not come to a call"):
        served.endpoint.call(lambda: time.sleep(0.5))


def test_refusals_reach_the_client_in_openai_s_form(served: Served) -> None:
    refused = served.ask({"messages": [{"role": "user", "content": "2" * 99}]})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    with ThreadPoolExecutor(1) as client:
        call = client.submit(served.ask)
        turn = served.turns.get(timeout=20.0)
        served.endpoint.resolve([(turn, EngineError("no such token"))])
        assert call.result().json()["error"]["message"] == "no such token"
    assert served.session.refused == 2
    assert httpx.get(served.endpoint.url.replace("/v1", "/v2")).status_code == 404


class NeverEnding:
    """A stream whose turns get no token."""

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.cuts: list[Any] = []

    def submit(self, key: Any, prompt_ids: list[int], resume: Any, **options: Any) -> None:
        self.open.append(key)

    def cut(self, key: Any) -> None:
        self.cuts.append(key)

    def step(self) -> list[Any]:
        time.sleep(0.01)
        return []


def test_turns_that_nobody_waits_for_are_cut(served: Served) -> None:
    stream: Any = NeverEnding()
    name = str(Path(__file__).with_name("agents_of_users.py")) + ":leaving"
    agents = AgentPool(name, {}, processes=0, timeout_s=20.0, blocking_s=20.0)
    player, episode = AgentPlayer(stream, agents, concurrency=1), served.session.episode
    player.add(episode, {"prompt": []})
    ended: list[Episode] = []
    wait_until(lambda: bool(ended.extend(player.step(0.05)) or ended))
    player.close()
    agents.close()
    assert (ended, episode.end) == ([episode], "failed")
    assert episode.error == "the agent ended without a turn of the policy"
    assert episode.info["abandoned_calls"] == 2
    assert len(set(stream.open)) == 2
    assert set(stream.cuts) == set(stream.open)


class Digits(NeverEnding):
    """A stream that ends each turn at once, with the digit 7."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token, self.waiting = token, list[Any]()

    def submit(self, key: Any, prompt_ids: list[int], resume: Any, **options: Any) -> None:
        self.open.append(key)
        self.waiting.append(key)

    def step(self) -> list[Any]:
        done = Completion(0, [self.token], [-0.5], "length", 3)
        ended, self.waiting = self.waiting, []
        return [StreamedCompletion(key, 0, done) for key in ended]

    def partials(self) -> list[Any]:
        return []

    def forget(self, key: Any) -> None:
        pass


def test_an_interrupted_episode_asks_again_and_samples_what_is_new(
    served: Served, tokenizer: PreTrainedTokenizerBase
) -> None:
    [token] = tokenizer.encode("7", add_special_tokens=False)
    name, row = f"{Path(__file__).with_name('agents_of_users.py')}:slowly", {"prompt": [ASK_7]}
    saved: dict[int, EpisodeTree] = {}

    def begin(tree: EpisodeTree | None = None) -> tuple[Any, Digits, Episode]:
        stream: Any = Digits(token)
        agents = AgentPool(name, {"delay": 0.3}, 0, 20.0, 20.0)
        limits = EpisodeLimits(400, 600)
        episode = Episode(0, 0, 0, served.session.episode.tokenizer, limits, [1])
        player = AgentPlayer(stream, agents, concurrency=1)
        player.add(episode, row, tree)
        return player, stream, episode

    def end(player: Any) -> None:
        player.close()
        player._agents.close()

    def has_two_turns() -> bool:
        player.step(0.02)
        saved.update(player.save(1.0))
        return any(len(tree["sequences"][0]["turns"]) == 2 for tree in saved.values())

    player, stream, _ = begin()
    wait_until(has_two_turns)
    end(player)
    assert len(stream.open) == 2
    player, stream, episode = begin(*saved.values())
    while player.busy:
        player.step(0.02)
    end(player)
    assert len(stream.open) == 1
    assert (episode.end, episode.error) == ("done", "")
    assert episode.transcript is not None
    [sequence] = episode.transcript.sequences
    assert [sequence.token_ids[start] for start, _ in sequence.turns] == [token] * 3
    assert len(episode.actions) == 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_episodes_play_at_once(
    served: Served, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Each has its own `openai` client; none goes on before all have asked."""
    count = 1000
    [token] = tokenizer.encode("7", add_special_tokens=False)
    stream: Any = Digits(token)
    name = f"{Path(__file__).with_name('agents_of_users.py')}:together"
    agents = AgentPool(name, {"count": count}, 0, 900.0, 900.0)
    player = AgentPlayer(stream, agents, concurrency=count)
    made, limits = served.session.episode.tokenizer, EpisodeLimits(400, 600)
    episodes = [Episode(key, key, 0, made, limits, [1]) for key in range(count)]
    player.play(episodes, [{"prompt": []}] * count)
    agents.close()
    assert {(episode.end, episode.error) for episode in episodes} == {("done", "")}
    assert {episode.transcript.turns for episode in episodes if episode.transcript} == {2}
    assert {len(episode.transcript.sequences) for episode in episodes if episode.transcript} == {1}
    assert len(stream.open) == len(set(stream.open)) == 2 * count


def test_a_program_ends_with_its_rollout() -> None:
    def children() -> list[psutil.Process]:
        there = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie: it has ended
                there += [child] if "600.5" in child.cmdline() else []
        return there

    for ends in ("episode", "pool"):
        pool = AgentPool("sleep 600.5", {}, processes=0, timeout_s=600.0, blocking_s=60.0)
        place = pool.open()
        call = place.reset({ENDPOINT: (pool.endpoint.url, "key")})
        wait_until(lambda: len(children()) == 1)
        if ends == "episode":
            place.close()
            wait_until(lambda: not children())
            assert call.exception(20.0) is not None
        pool.close()
        assert children() == []


class Waits:
    """An environment that never answers."""

    made: list[Waits]
    closed = False

    def __init__(self) -> None:
        self.made.append(self)

    async def reset(self, row: Any) -> Observation:
        await asyncio.sleep(3600)
        return Observation()

    async def step(self, action: Any) -> Observation:
        return Observation()

    async def close(self) -> None:
        self.closed = True


def test_an_environment_that_is_at_work_plays_no_other_episode() -> None:
    Waits.made = []
    environments = LocalEnvironments(Waits, timeout_s=3600.0)
    place = environments.open()
    call = place.reset({})
    wait_until(lambda: bool(environments.host.under_way))
    place.close()
    assert isinstance(call.exception(20.0), environment_pool.protocol.EnvironmentFailure)
    wait_until(lambda: Waits.made[0].closed)
    environments.open().reset({})
    wait_until(lambda: len(Waits.made) == 2)
    environments.close()
