"""The game of `examples.guessing`, as an agent that knows OpenAI's API and nothing of this project.

    pyflyte run workflows/agents.py agents --config preset:openai_agent

The same loop plays against any server: `await play(row, AsyncOpenAI())`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI


async def play(
    row: Mapping[str, Any], client: AsyncOpenAI, *, max_turns: int = 6, turn_cost: float = 0.25
) -> dict[str, object]:
    """Let the policy guess; 1 for the number, less `turn_cost` a turn beyond bisection's."""
    secret, about = int(row["reward_model"]["ground_truth"]), row["extra_info"]
    needed = math.ceil(math.log2(about["high"] - about["low"] + 2))
    messages: list[Any] = list(row["prompt"])
    for turn in range(1, max_turns + 1):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=4
        )
        said = answer.choices[0].message
        numbers = re.findall(r"-?\d+", said.content or "")
        guess = int(numbers[-1]) if numbers else None
        if guess == secret:
            reward = max(0.0, 1.0 - turn_cost * max(0, turn - needed))
            return {"reward": reward, "success": turn <= needed, "turns": turn}
        told = "Give a number." if guess is None else "higher" if guess < secret else "lower"
        messages += [said, {"role": "user", "content": told}]
    return {"reward": 0.0, "success": False, "turns": max_turns}
