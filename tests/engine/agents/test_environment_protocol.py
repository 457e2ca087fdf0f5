"""Environments by name, their options, and what they may leave out."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from engine.agents import (
    Action,
    Observation,
    ResumableEnvironment,
    ToolCall,
    make_environment,
    register_environment,
    tool_schemas,
)
from engine.errors import ConfigError


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


async def played(environment: Any, texts: list[str]) -> list[Observation]:
    seen = [await environment.reset({"start": 7})]
    for text in texts:
        seen.append(await environment.step(Action(text)))
    await environment.close()
    return seen


@pytest.mark.parametrize("name", ["countdown of a test", f"{__name__}:Countdown"])
def test_an_environment_is_made_by_name_with_its_options(name: str) -> None:
    environment = make_environment(name, {"turns": "3"})
    seen = asyncio.run(played(environment, ["a", "bb", "ccc"]))
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
