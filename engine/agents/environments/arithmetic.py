"""Products of long numbers: beyond a small model by itself, easy with the calculator."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from engine.agents.environments.tools import ToolEnvironment
from engine.agents.protocol import Action, Message, Observation, ToolCall
from engine.agents.registry import register_environment
from engine.errors import ConfigError
from engine.rewards.answer_match import extract_answer, normalise_number

_FORM = 'Give the answer in the last line as "#### number".'


@register_environment("arithmetic")
class ArithmeticEnvironment(ToolEnvironment):
    """The row's prompt asks for a number, `reward_model.ground_truth`; a right answer earns 1.

    A call that can't be read or run earns `error_penalty`, so that calls learn their form.
    """

    def __init__(
        self,
        *,
        tools: Sequence[Any] = ("calculator",),
        mcp_servers: Mapping[str, Any] | None = None,
        timeout_s: float = 10.0,
        max_output: int = 400,
        max_calls: int = 4,
        method: Literal["strict", "flexible"] = "flexible",
        error_penalty: float = 0.0,
    ) -> None:
        """`method` is `answer_match`'s: what counts is the number after `####`, or the last one."""
        super().__init__(
            tools=tools,
            mcp_servers=mcp_servers,
            timeout_s=timeout_s,
            max_output=max_output,
            max_calls=max_calls,
        )
        self._method: Literal["strict", "flexible"] = method
        self._penalty = error_penalty

    async def step(self, action: Action) -> Observation:
        seen = await super().step(action)
        if seen.done:
            return seen
        wrong = sum(str(message["content"]).startswith("error:") for message in seen.messages)
        info = {**seen.info, "call_errors": wrong}
        return Observation(seen.messages, -abs(self._penalty) * wrong, False, info)

    async def answered(self, action: Action) -> Observation:
        wanted = normalise_number(str(truth_of(self.row)))
        correct = wanted is not None and wanted == extract_answer(action.text, method=self._method)
        info = {"calls": self.calls, "called": self.calls > 0, "correct": correct}
        return Observation(reward=float(correct), done=True, info=info)


def truth_of(row: Mapping[str, Any]) -> Any:
    """A row's ground truth; raise ConfigError for a row without one."""
    model = row.get("reward_model")
    if not isinstance(model, Mapping) or "ground_truth" not in model:
        raise ConfigError("the environment reads reward_model.ground_truth, which a row lacks")
    return model["ground_truth"]


def arithmetic_rows(
    count: int, seed: int = 0, digits: tuple[int, int] = (3, 5), split: str = "train"
) -> list[dict[str, Any]]:
    """Rows of RL data: the product of two numbers of `digits` (from, to) digits each."""
    draw = random.Random(f"{split} {seed}")
    rows = []
    for place in range(count):
        a, b = (draw.randrange(10 ** (n - 1), 10**n) for n in (draw.randint(*digits) for _ in "ab"))
        question = f"What is {a} * {b}? {_FORM}"
        rows.append(
            {
                "data_source": "arithmetic",
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a * b)},
                "extra_info": {"split": split, "index": place, "expression": f"{a} * {b}"},
            }
        )
    return rows


def arithmetic_demonstration(row: Mapping[str, Any]) -> list[Message]:
    """The turns of a right episode after the prompt, for a warm start: call, result, answer."""
    call = ToolCall("calculator", {"expression": row["extra_info"]["expression"]}, "call_0")
    truth = str(truth_of(row))
    return [
        {"role": "assistant", "content": "", "tool_calls": [call.message()]},
        {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": truth},
        {"role": "assistant", "content": f"#### {truth}"},
    ]
