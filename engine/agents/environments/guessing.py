"""Higher or lower: find a number in as few turns as bisection takes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from engine.agents.protocol import Action, Observation
from engine.agents.registry import register_environment
from engine.data.guessing import HIGHER, LOWER
from engine.errors import ConfigError

_NUMBER = re.compile(r"-?\d{1,9}")


@register_environment("guessing")
class GuessingEnvironment:
    """The secret is `reward_model.ground_truth`, between `extra_info.low` and `high`.

    The number that a turn ends with is its guess. The guess that is right earns 1 less
    `turn_cost` for each turn that bisection would not have needed; none earns 0. Success is to
    need none of these.
    """

    def __init__(self, *, max_turns: int = 10, turn_cost: float = 0.1) -> None:
        if max_turns < 1 or turn_cost < 0:
            raise ConfigError(
                "rollout.agent.environment.options: max_turns is at least 1, turn_cost at least 0"
            )
        self._max_turns, self._turn_cost = max_turns, turn_cost
        self._low = self._high = self._secret = self._turns = 0

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        try:
            about = row["extra_info"]
            self._low, self._high = int(about["low"]), int(about["high"])
            self._secret = int(row["reward_model"]["ground_truth"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "environment 'guessing' reads extra_info.low, extra_info.high and "
                f"reward_model.ground_truth, and a row lacks them ({error!r})"
            ) from None
        self._turns = 0
        return Observation()

    async def step(self, action: Action) -> Observation:
        self._turns += 1
        numbers = _NUMBER.findall(action.text[-1000:])
        guess = int(numbers[-1]) if numbers else None
        if guess == self._secret:
            return self._ended(solved=True)
        if self._turns >= self._max_turns:
            return self._ended(solved=False)
        if guess is None:
            told = f"Give a number from {self._low} to {self._high}."
        else:
            told = HIGHER if guess < self._secret else LOWER
        return Observation(({"role": "user", "content": told},))

    async def close(self) -> None:
        """Nothing is held."""

    def get_state(self) -> object:
        return self._low, self._high, self._secret, self._turns

    def set_state(self, state: Any) -> None:
        self._low, self._high, self._secret, self._turns = state

    def _ended(self, solved: bool) -> Observation:
        needed = math.ceil(math.log2(self._high - self._low + 2))  # by bisection, at worst
        reward = max(0.0, 1.0 - self._turn_cost * max(0, self._turns - needed)) if solved else 0.0
        success = solved and self._turns <= needed
        info = {"solved": solved, "success": success, "turns": self._turns}
        return Observation(reward=reward, done=True, info=info)
