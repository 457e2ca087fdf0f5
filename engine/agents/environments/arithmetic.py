"""Products of long numbers: beyond a small model by itself, easy with the calculator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from engine.agents.environments.tools import ToolEnvironment
from engine.agents.protocol import Action, Observation
from engine.agents.registry import register_environment
from engine.errors import ConfigError
from engine.rewards.answer_match import extract_answer, normalise_number


@register_environment("arithmetic")
class ArithmeticEnvironment(ToolEnvironment):
    """The row's prompt asks for a number, `reward_model.ground_truth`; a right answer earns 1.

    A call that can't be read or run earns `error_penalty`, so that calls learn their form.
    """

    def __init__(
        self,
        *,
        tools: Sequence[object] = ("calculator",),
        mcp_servers: Mapping[str, object] | None = None,
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


def truth_of(row: Mapping[str, object]) -> object:
    """A row's ground truth; raise ConfigError for a row without one."""
    model = row.get("reward_model")
    if not isinstance(model, Mapping) or "ground_truth" not in model:
        raise ConfigError("the environment reads reward_model.ground_truth, which a row lacks")
    return model["ground_truth"]
