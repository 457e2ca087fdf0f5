"""Tools of a real MCP server, which runs beside."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from engine.agents import Action, EnvironmentPool, ToolCall, make_environment, tool_schemas
from engine.errors import ConfigError

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
