"""An agent of the OpenAI Agents SDK, as its documentation writes one."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)
added: list[int] = []


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    added.append(a + b)
    return a + b


async def play(row: dict[str, Any], client: Any) -> dict[str, object]:
    """Let the agent work until it answers; the reward is the length of its answer."""
    agent = Agent(
        name="Adder",
        instructions="Use the tool.",
        tools=[add],
        model=OpenAIChatCompletionsModel(model="policy", openai_client=client),
        model_settings=ModelSettings(max_tokens=8),
    )
    try:
        result = await Runner.run(agent, row["prompt"][-1]["content"], max_turns=3)
    except MaxTurnsExceeded:
        return {"reward": 0.0, "answered": False, "added": len(added)}
    return {"reward": float(len(result.final_output)), "answered": True, "added": len(added)}
