"""Environments: adapters, the shipped ones, the protocol and MCP servers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import pickle
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.agents import (
    Action,
    EnvironmentFailure,
    EnvironmentPool,
    Observation,
    ResumableEnvironment,
    ToolCall,
    make_environment,
    register_environment,
    tool_schemas,
)
from engine.agents.call_parsers import parsed_action, resolve_call_parser
from engine.errors import ConfigError, EngineError, EpisodeError
from examples.guessing import guessing_demonstration, guessing_row
from examples.products import Habits, product_demonstration, product_row
from examples.python_tasks import KINDS, program_text, python_demonstration, python_row

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


def openenv_python() -> str:
    """A Python with openenv, whose needs don't go together with vLLM's."""
    given = os.environ.get("OPENENV_PYTHON", "")
    return given or (sys.executable if importlib.util.find_spec("openenv") else "")


@pytest.fixture(scope="module", params=["spoken", pytest.param("real", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "real":
        if not openenv_python():
            pytest.skip("OPENENV_PYTHON names no Python with openenv")
        yield from started([openenv_python(), str(HERE / "openenv_countdown.py")])
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


def played_row(environment: Any, row: Mapping[str, Any], texts: list[str]) -> list[Observation]:
    parser = resolve_call_parser("hermes")

    async def play() -> list[Observation]:
        assert (await environment.reset(row)) == Observation()
        seen = []
        for text in texts:
            seen.append(await environment.step(parsed_action(parser, text)))
            if seen[-1].done:
                break
            if isinstance(environment, ResumableEnvironment):  # the state is all that there is
                state = environment.get_state()
                environment.set_state(state)
        return seen

    return asyncio.run(play())


def test_arithmetic_is_answered_with_the_calculator() -> None:
    row = product_row(482, 937, "train", 0)
    call, result, answer = product_demonstration(row)
    environment = make_environment("arithmetic", {"error_penalty": 0.25})
    texts = ["<tool_call>{</tool_call>", call["content"], answer["content"]]
    seen = played_row(environment, row, texts)
    assert [one.reward for one in seen] == [-0.25, 0.0, 1.0]
    assert seen[1].messages[0]["content"] == result["content"] == "451634"
    assert seen[2].info == {"calls": 2, "called": True, "correct": True}
    (wrong,) = played_row(environment, row, ["#### 1"])
    assert (wrong.reward, wrong.done, wrong.info["called"]) == (0.0, True, False)


@pytest.mark.parametrize("habit", ["calls", "slips", "malformed", "head"])
def test_habits_of_who_calculates_are_what_the_environment_says(habit: str) -> None:
    shares = {"calls": 0.0, "slips": 0.0, "malformed": 0.0} | {habit: 1.0}
    habits = Habits(**{name: shares[name] for name in ("calls", "slips", "malformed")})
    row = product_row(482, 937, "train", 0)
    for seed in range(5):
        turns = product_demonstration(row, random.Random(seed), habits)
        said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        told = [turn["content"] for turn in turns if turn["role"] == "tool"]
        seen = played_row(make_environment("arithmetic"), row, said)
        if habit == "malformed":
            assert seen[0].messages[0]["content"].startswith("error: the call")
            continue
        assert [one.messages[0]["content"] for one in seen[:-1]] == told
        assert seen[-1].done
        assert seen[-1].reward == float(habit == "calls")
        assert seen[-1].info["called"] is (habit != "head")


def test_a_number_is_guessed_by_bisection() -> None:
    environment = make_environment("guessing", {"max_turns": 8})
    for secret in range(1, 101, 5):
        row = guessing_row("Ada", 1, 100, secret, "train", 0)
        for draw in (None, random.Random(secret)):
            turns = guessing_demonstration(row, draw, 0.5, max_turns=8)
            guesses = [turn["content"] for turn in turns if turn["role"] == "assistant"]
            answers = [turn["content"] for turn in turns if turn["role"] == "user"]
            seen = played_row(environment, row, guesses)
            assert [one.messages[0]["content"] for one in seen[:-1]] == answers
            assert len(seen) == len(guesses) <= 8
            if draw is None:
                assert (seen[-1].reward, seen[-1].info["solved"]) == (1.0, True)
                assert seen[-1].info["success"] is True
                assert len(seen) <= 7


def test_guessing_without_a_plan_earns_less() -> None:
    environment = make_environment("guessing", {"max_turns": 9, "turn_cost": 0.25})
    row = guessing_row("Ada", 1, 100, 50, "train", 0)
    seen = played_row(environment, row, ["1"] * 8 + ["I say 50"])
    assert [one.messages[0]["content"] for one in seen[:-1]] == ["higher"] * 8
    assert (seen[-1].reward, seen[-1].info["turns"]) == (0.5, 9)  # bisection needs 7
    assert (seen[-1].info["solved"], seen[-1].info["success"]) == (True, False)
    seen = played_row(environment, row, ["what?"] + ["99"] * 8)
    assert seen[0].messages[0]["content"] == "Give a number from 1 to 100."
    assert (seen[-1].reward, seen[-1].done, seen[-1].info["solved"]) == (0.0, True, False)
    with pytest.raises(EngineError, match=r"extra_info\.low"):
        asyncio.run(environment.reset({}))


def test_a_program_is_corrected_by_what_its_tests_say() -> None:
    row = {
        "prompt": [],
        "reward_model": {
            "ground_truth": {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [3, 4]}
        },
    }
    environment = make_environment("python_tasks")
    wrong = "```python\ndef add(a, b):\n    return 4\n```"
    right = "```python\ndef add(a, b):\n    return a + b\n```"
    seen = played_row(environment, row, ["def add(", wrong, right])
    assert [one.reward for one in seen] == [0.0, 0.5, 0.5]
    assert seen[0].messages[0]["content"].startswith("0 of 2 tests pass; these fail: 1, 2.")
    assert seen[1].messages[0]["content"].startswith("1 of 2 tests pass; these fail: 1.")
    assert (seen[2].done, seen[2].messages, seen[2].info["solved"]) == (True, (), True)
    strict = make_environment("python_tasks", {"partial": False, "max_turns": 1})
    (seen_once,) = played_row(strict, row, [wrong])
    assert (seen_once.reward, seen_once.done) == (0.0, True)
    with pytest.raises(EngineError, match=r"reward_model\.ground_truth"):
        asyncio.run(environment.reset({}))


def test_programs_of_the_demonstrations_get_the_answers_that_they_show() -> None:
    environment = make_environment("python_tasks", {"max_turns": 2, "partial": False})
    draw = random.Random(0)
    corrected = 0
    for first in KINDS:
        task = ((first, 3), ("multiply by", 4))
        row = python_row(task, "train", 0)
        (right,) = played_row(environment, row, [program_text(task)])
        assert (right.reward, right.done) == (1.0, True)
        turns = python_demonstration(task, draw, 1.0, 1.0, 1.0)
        said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        told = [turn["content"] for turn in turns if turn["role"] == "user"]
        seen = played_row(environment, row, said)
        assert [one.messages[0]["content"] for one in seen[:-1]] == told
        assert seen[-1].reward == 1.0
        corrected += len(told)
    assert corrected == 3  # "multiply by 3, then by 4" can't go wrong


@register_environment("countdown of a test")
class Countdown:
    def __init__(self, *, turns: int = 2) -> None:
        self.turns = turns

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.left = self.turns
        return Observation(({"role": "user", "content": str(row["start"])},))

    async def step(self, action: Action) -> Observation:
        self.left -= 1
        return Observation(reward=float(len(action.text)), done=self.left == 0)

    async def close(self) -> None:
        self.left = 0

    def get_state(self) -> object:
        return self.left

    def set_state(self, state: Any) -> None:
        self.left = state

    def tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "f"}}]


class Unfinished:
    async def reset(self, row: Mapping[str, Any]) -> Observation:
        return Observation()

    def step(self, action: Action) -> Observation:
        return Observation()


async def played_environment(environment: Any, texts: list[str]) -> list[Observation]:
    seen = [await environment.reset({"start": 7})]
    for text in texts:
        seen.append(await environment.step(Action(text)))
    await environment.close()
    return seen


@pytest.mark.parametrize("name", ["countdown of a test", f"{__name__}:Countdown"])
def test_an_environment_is_made_by_name_with_its_options(name: str) -> None:
    environment = make_environment(name, {"turns": "3"})
    seen = asyncio.run(played_environment(environment, ["a", "bb", "ccc"]))
    assert seen[0].messages == ({"role": "user", "content": "7"},)
    assert [one.reward for one in seen] == [0.0, 1.0, 2.0, 3.0]
    assert [one.done for one in seen] == [False, False, False, True]
    assert isinstance(environment, ResumableEnvironment)
    assert tool_schemas(environment)[0]["function"] == {"name": "f"}


def test_what_can_t_play_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Unfinished has no `async def step`"):
        register_environment("unfinished")(Unfinished)
    with pytest.raises(ConfigError, match=r"Unfinished has no `async def step`"):
        make_environment(f"{__name__}:Unfinished")
    with pytest.raises(ConfigError, match=r"did you mean 'countdown of a test'"):
        make_environment("countdown of test")
    with pytest.raises(ConfigError, match=r"environment.options.speed: .* doesn't read 'speed'"):
        make_environment("countdown of a test", {"speed": 1})


def test_what_travels_is_frozen_and_picklable() -> None:
    call = ToolCall("add", {"a": 1}, "call_0")
    action = Action("…", (1, 2), (call,), ("no JSON",))
    assert pickle.loads(pickle.dumps(action)) == action
    plain = Observation()
    assert (plain.messages, plain.reward, plain.done, dict(plain.info)) == ((), 0.0, False, {})
    assert not isinstance(Unfinished(), ResumableEnvironment)
    assert tool_schemas(Unfinished()) == []


pytest.importorskip("mcp")


SERVER = Path(__file__).parent / "mcp_words.py"


OPTIONS = {
    "tools": ["calculator"],
    "mcp_servers": {"words": {"command": sys.executable, "args": [str(SERVER)]}},
    "timeout_s": 60.0,  # of a call: the first one waits until the server has loaded its libraries
}


def test_tools_of_a_server_are_called() -> None:
    """In a process of environments, whose end is the server's, too."""
    with EnvironmentPool("tools", OPTIONS, processes=1, timeout_s=60.0) as pool:
        about = {tool["function"]["name"]: tool["function"] for tool in pool.tools}
        assert about["count"]["description"] == "Count a letter in a text."
        assert about["count"]["parameters"]["required"] == ["text", "letter"]
        episodes = [pool.open() for _ in range(3)]
        for one in [episode.reset({"prompt": []}) for episode in episodes]:
            one.result()
        given = [{"text": "banana", "letter": letter} for letter in ("a", "n", "na")]
        calls = [Action("", tool_calls=(ToolCall("count", one, "c"),)) for one in given]
        asked = [one.step(call) for one, call in zip(episodes, calls, strict=True)]
        said = [one.result().messages[0]["content"] for one in asked]
        assert said[:2] == ["3", "2"]
        assert said[2].startswith("error:")
        wrong = Action("", tool_calls=(ToolCall("count", {"text": 1}, "c"),))
        told = episodes[0].step(wrong).result().messages[0]["content"]
        assert told.startswith("error: ")
        assert "letter" in told or "string" in told


def test_a_server_that_isn_t_there_is_named() -> None:
    spec = {"command": sys.executable, "args": ["-c", "raise SystemExit(3)"]}
    with pytest.raises(ConfigError, match=r"mcp_servers\.gone doesn't answer"):
        make_environment("tools", {"mcp_servers": {"gone": spec}})
    with pytest.raises(ConfigError, match=r"mcp_servers\.gone: give either `command`"):
        make_environment("tools", {"mcp_servers": {"gone": {}}})


def test_a_server_is_asked_in_a_loop_that_runs() -> None:
    async def schemas() -> list[str]:
        return [one["function"]["name"] for one in tool_schemas(make_environment("tools", OPTIONS))]

    assert asyncio.run(schemas()) == ["calculator", "count"]
