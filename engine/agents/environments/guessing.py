"""Higher or lower: find a number in as few turns as bisection takes."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from typing import Any

from engine.agents.protocol import Action, Message, Observation
from engine.agents.registry import register_environment
from engine.errors import ConfigError

_NUMBER = re.compile(r"-?\d{1,9}")


@register_environment("guessing")
class GuessingEnvironment:
    """The secret is `reward_model.ground_truth`, between `extra_info.low` and `high`.

    The number that a turn ends with is its guess. The guess that is right earns 1 less
    `turn_cost` for each turn that bisection would not have needed; none earns 0.
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
            told = "higher" if guess < self._secret else "lower"
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
        info = {"solved": solved, "turns": self._turns}
        return Observation(reward=reward, done=True, info=info)


def guessing_rows(
    count: int, seed: int = 0, low: int = 1, high: int = 100, split: str = "train"
) -> list[dict[str, Any]]:
    """Rows of RL data, each with a secret from `low` to `high`."""
    draw = random.Random(f"{split} {seed}")
    question = (
        f"I think of a number from {low} to {high}. Guess it; I say whether it is higher or lower. "
        "Answer with a number alone."
    )
    return [
        {
            "data_source": "guessing",
            "prompt": [{"role": "user", "content": question}],
            "ability": "game",
            "reward_model": {"style": "rule", "ground_truth": str(draw.randint(low, high))},
            "extra_info": {"split": split, "index": place, "low": low, "high": high},
        }
        for place in range(count)
    ]


def guessing_demonstration(row: Mapping[str, Any], seed: int | None = None) -> list[Message]:
    """The turns of an episode after the prompt: bisection, or with a `seed` guesses at random.

    Random ones stay within what is left: a warm start learns the game, not its best play.
    """
    low, high = int(row["extra_info"]["low"]), int(row["extra_info"]["high"])
    secret = int(row["reward_model"]["ground_truth"])
    draw = random.Random(f"{seed} {secret}")
    turns: list[Message] = []
    while True:
        guess = (low + high) // 2 if seed is None else draw.randint(low, high)
        turns.append({"role": "assistant", "content": str(guess)})
        if guess == secret:
            return turns
        turns.append({"role": "user", "content": "higher" if guess < secret else "lower"})
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
