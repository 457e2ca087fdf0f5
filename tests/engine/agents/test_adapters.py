"""Environments of other packages: Gymnasium's, and those behind an OpenEnv server."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.agents import Action, EnvironmentFailure, EnvironmentPool, Observation, make_environment
from engine.errors import ConfigError, EpisodeError

HERE = Path(__file__).parent
ROW = {"prompt": [{"role": "system", "content": "Play."}], "extra_info": {"seed": 6}}


class Corridor:
    """Walk from the seed to 0."""

    def __init__(self, *, length: int = 9) -> None:
        self.length, self.closed = length, False

    def reset(self, *, seed: int | None = None) -> tuple[int, dict[str, Any]]:
        self.place = (seed or 0) % self.length
        return self.place, {"length": self.length}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place += 1 if action else -1
        return self.place, -0.5, self.place <= 0, self.place >= self.length, {}

    def close(self) -> None:
        self.closed = True


def shown(place: int) -> str:
    return f"You are at {place}."


def played(environment: Any, texts: list[str]) -> list[Observation]:
    async def play() -> list[Observation]:
        seen = [await environment.reset(ROW)]
        for text in texts:
            seen.append(await environment.step(Action(text)))
        await environment.close()
        return seen

    return asyncio.run(play())


def test_an_environment_like_gymnasium_s_is_played_in_text() -> None:
    options = {
        "id": f"{__name__}:Corridor",
        "arguments": {"length": 8},
        "actions": ["left", "right"],
        "show": f"{__name__}:shown",
        "invalid_reward": -1.0,
    }
    environment = make_environment("gymnasium", options)
    seen = played(environment, ["not left: right", "Right", "up"])
    assert [one["content"] for one in seen[0].messages] == ["Play.", "You are at 6."]
    assert [one.reward for one in seen] == [0.0, -0.5, -0.5, -1.0]
    assert [one.done for one in seen] == [False, False, True, False]
    assert seen[3].messages[0]["content"] == "That is no action: name one of left, right"
    assert environment._env.closed  # type: ignore[attr-defined]
    short = make_environment("gymnasium", options | {"max_turns": 1})
    assert played(short, ["left"])[1].done
    with pytest.raises(ConfigError, match="can't be imported"):
        make_environment("gymnasium", {"id": "no_such:Thing"})


def test_an_environment_of_gymnasium_itself_is_named_by_its_id() -> None:
    pytest.importorskip("gymnasium")
    environment = make_environment("gymnasium", {"id": "CartPole-v1"})
    seen = played(environment, ["I push 1", "7", "nothing"])
    assert seen[0].messages[1]["content"].startswith("[")
    assert (seen[1].reward, seen[1].done) == (1.0, False)
    assert seen[2].messages[0]["content"] == "That is no action: 7 is not in Discrete(2)"
    assert seen[3].messages[0]["content"] == "That is no action: give a number"
    assert seen[0] == played(make_environment("gymnasium", {"id": "CartPole-v1"}), [])[0]
    with pytest.raises(ConfigError, match="can't be made"):
        make_environment("gymnasium", {"id": "NoSuchThing-v9"})


SPOKEN = """
import asyncio, json, sys
from websockets.asyncio.server import serve

async def session(socket):
    left = 0
    async for text in socket:
        message = json.loads(text)
        data = message.get("data", {})
        if message["type"] == "close":
            return
        if data.get("message") == "fail":
            told = {"message": "no luck", "code": "EXECUTION_ERROR"}
            await socket.send(json.dumps({"type": "error", "data": told}))
            continue
        reset = message["type"] == "reset"
        left = data["seed"] if reset else left - len(data["message"])
        reward = None if reset else float(len(data["message"]))
        seen = {"text": f"{left} left", "left": left}
        answer = {"observation": seen, "reward": reward, "done": not reset and left <= 0}
        await socket.send(json.dumps({"type": "observation", "data": answer}))

async def main():
    async with serve(session, "127.0.0.1", int(sys.argv[1])):
        await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


def started(command: list[str]) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*command, str(port)])
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _real() -> str:
    """A Python with openenv-core, whose needs don't go together with vLLM's."""
    given = os.environ.get("OPENENV_PYTHON", "")
    return given or (sys.executable if importlib.util.find_spec("openenv") else "")


@pytest.fixture(scope="module", params=["spoken", pytest.param("real", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "real":
        if not _real():
            pytest.skip("OPENENV_PYTHON names no Python with openenv-core")
        yield from started([_real(), str(HERE / "openenv_countdown.py")])
    else:
        yield from started([sys.executable, "-c", SPOKEN])


def test_a_server_of_openenv_is_played_in_sessions(url: str) -> None:
    options = {"url": url, "observation_fields": ["text"]}
    with EnvironmentPool("openenv", options, processes=1, timeout_s=20.0) as pool:
        episodes = [pool.open() for _ in range(3)]
        for episode in episodes:
            first = episode.reset(ROW).result()
            assert [one["content"] for one in first.messages] == ["Play.", "6 left"]
        seen = [one.step(Action("abc"[: i + 1])).result() for i, one in enumerate(episodes)]
        assert [one.messages[0]["content"] for one in seen] == ["5 left", "4 left", "3 left"]
        assert [one.reward for one in seen] == [1.0, 2.0, 3.0]
        last = episodes[2].step(Action("abc")).result()
        assert (last.done, last.info["observation"]) == (True, {"text": "0 left", "left": 0})
        with pytest.raises(EnvironmentFailure, match=r"EXECUTION_ERROR.*no luck"):
            episodes[0].step(Action("fail")).result()
        assert episodes[0].reset(ROW).result().messages[1]["content"] == "6 left"


def test_what_openenv_shows_is_all_of_it_where_no_field_is_named(url: str) -> None:
    environment = make_environment("openenv", {"url": url})
    assert played(environment, ["ab"])[1].messages[0]["content"] == "4 left"
    wrong = make_environment("openenv", {"url": url, "observation_fields": ["words"]})
    with pytest.raises(EpisodeError, match="has no 'words'; it has text, left"):
        played(wrong, [])
    assert json.loads(environment._shown({"a": 1, "b": 2})) == {"a": 1, "b": 2}  # type: ignore[attr-defined]


def test_a_server_that_isn_t_there_is_said() -> None:
    environment = make_environment("openenv", {"url": "http://127.0.0.1:9"})
    with pytest.raises(EpisodeError, match=r"no OpenEnv server at ws://127.0.0.1:9/ws"):
        played(environment, [])
    with pytest.raises(ConfigError, match=r"needs options\.url"):
        make_environment("openenv", {"url": "localhost"})
