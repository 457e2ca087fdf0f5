"""An environment that answers calls of tools until the policy answers without one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from engine.agents.protocol import Action, Message, Observation
from engine.agents.registry import register_environment
from engine.agents.tools.mcp_servers import McpServers
from engine.agents.tools.registry import ToolSpec, resolve_tools
from engine.agents.tools.running import ToolLimits, answer, shorten, tool_message
from engine.errors import ConfigError


@register_environment("tools")
class ToolEnvironment:
    """The row's prompt stands; a turn without a call is the answer and ends the episode.

    A subclass says in `answered` what the answer is worth.
    """

    def __init__(
        self,
        *,
        tools: Sequence[Any] = (),
        mcp_servers: Mapping[str, object] | None = None,
        timeout_s: float = 10.0,
        max_output: int = 4000,
        max_calls: int = 8,
    ) -> None:
        """`tools` are names, `package.module:function`, or mappings with `name` and `options`.

        `mcp_servers` are MCP servers by name, as {"command": …, "args": […]} or {"url": …}.
        `timeout_s` is a call's deadline in seconds, `max_output` the characters of a result that
        the model reads, and `max_calls` how many calls of a turn are run.
        """
        if max_calls < 1 or max_output < 1 or timeout_s <= 0:
            raise ConfigError(
                "rollout.agent.environment.options: max_calls and max_output are at least 1, "
                f"timeout_s above 0 (they are {max_calls}, {max_output} and {timeout_s})"
            )
        specs: list[ToolSpec] = list(tools)
        if mcp_servers:
            specs += McpServers.of(mcp_servers).tools()
        self._tools = resolve_tools(specs)
        self._limits = ToolLimits(timeout_s, max_output)
        self._max_calls = max_calls
        self.row: Mapping[str, Any] = {}
        self.calls = 0  # that the episode has made so far, malformed ones included

    def tools(self) -> list[dict[str, Any]]:
        """The schemas for the chat template."""
        return [dict(tool.schema) for tool in self._tools.values()]

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.row, self.calls = row, 0
        return Observation()

    async def step(self, action: Action) -> Observation:
        if not action.tool_calls and not action.malformed:
            return await self.answered(action)
        self.calls += len(action.tool_calls) + len(action.malformed)
        return Observation(await self.results(action), info={"calls": self.calls})

    async def answered(self, action: Action) -> Observation:
        """The episode's end: what the policy wrote calls no tool."""
        return Observation(done=True, info={"calls": self.calls})

    async def results(self, action: Action) -> tuple[Message, ...]:
        """The tool messages that answer a turn's calls, side by side, in their order."""
        run, left = action.tool_calls[: self._max_calls], action.tool_calls[self._max_calls :]
        found = await asyncio.gather(*(answer(self._tools, call, self._limits) for call in run))
        refused = f"error: at most {self._max_calls} calls a turn are run"
        return (
            *found,
            *(tool_message(refused, call) for call in left),
            *(
                tool_message(f"error: {shorten(text, self._limits.max_output)}")
                for text in action.malformed[: self._max_calls]
            ),
        )

    async def close(self) -> None:
        """Nothing is held: MCP servers are shared by the process, and end with it."""

    def get_state(self) -> object:
        return {"row": dict(self.row), "calls": self.calls}

    def set_state(self, state: Any) -> None:
        self.row, self.calls = state["row"], state["calls"]
