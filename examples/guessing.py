"""Higher or lower: find a number in as few turns as bisection takes.

    Ada has a number from 2 to 8. Guess it; the answer is higher or lower.
    6 → lower → 3 → higher → 5

`data.source=guessing` makes rows, with demonstrations of a careless player; the environment
`guessing` answers the guesses.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from engine.agents import Action, Observation, register_environment
from engine.config import DataConfig
from engine.data.chat_template import Message
from engine.data.rows import rl_row
from engine.data.sources import Splits, register_source
from engine.errors import ConfigError
from engine.storage.json_rows import Row
from examples.demonstrations import deal, made_digest, make_splits, turn_rows

HIGHER, LOWER = "higher", "lower"  # what the environment says
NAMES = (
    *("Ada", "Amir", "Anna", "Ben", "Bo", "Carl", "Cleo", "Dana", "Dev", "Ella", "Emil", "Eva"),
    *("Finn", "Gina", "Hana", "Hugo", "Ida", "Igor", "Ines", "Ivan", "Jack", "Jana", "Joel"),
    *("June", "Kai", "Kim", "Lars", "Lena", "Liam", "Lily", "Luis", "Mara", "Max", "Mia", "Mona"),
    *("Nils", "Nina", "Noah", "Nora", "Olga", "Omar", "Otto", "Paul", "Petra", "Rita", "Rosa"),
    *("Sam", "Sara", "Tara", "Theo", "Tom", "Uma", "Vera", "Wei", "Yara", "Yuri", "Zoe"),
)


@register_source("guessing")
class GuessingGames:
    """`data.source=guessing`: somebody's number, one of `span` numbers, `largest` at most.

    Who has it tells held-out prompts from those that are trained on. The warm start's player
    guesses at random among what is left, a share `careless` of its guesses anywhere, and gives up
    after `max_turns`.
    """

    disjoint_splits = True

    def __init__(
        self, *, span: int = 7, largest: int = 9, careless: float = 0.3, max_turns: int = 6
    ) -> None:
        if span < 2 or largest < span or not 0 <= careless <= 1 or max_turns < 1:
            raise ConfigError(
                f"data.options span={span}, largest={largest}, careless={careless}, "
                f"max_turns={max_turns} make no games; give a span of 2 or more, up to largest, a "
                "share from 0 to 1, and a turn"
            )
        self._span, self._largest = span, largest
        self._careless, self._max_turns = careless, max_turns

    def digest(self, config: DataConfig, seed: int) -> str:
        return made_digest(__file__, config, seed, vars(self))

    def load(self, config: DataConfig, seed: int) -> Splits:
        names = deal(NAMES, seed)

        def game(split: str, draw: random.Random) -> tuple[str, int, int, int]:
            low = draw.randint(1, self._largest - self._span + 1)
            high = low + self._span - 1
            return draw.choice(names[split]), low, high, draw.randint(low, high)

        def rl_rows(split: str, count: int) -> list[Row]:
            draw = random.Random(f"guessing/{split}/{seed}")
            return [guessing_row(*game(split, draw), split, i) for i in range(count)]

        def demonstrations(split: str) -> Iterator[Row]:
            draw = random.Random(f"guessing/sft_{split}/{seed}")
            while True:
                row = guessing_row(*game(split, draw), f"sft_{split}", 0)
                turns = guessing_demonstration(row, draw, self._careless, self._max_turns)
                yield from turn_rows(row["prompt"], turns, {"split": f"sft_{split}"})

        digest = self.digest(config, seed)
        return make_splits(config, "guessing", digest, rl_rows, demonstrations)


def guessing_row(who: str, low: int, high: int, secret: int, split: str, index: int) -> Row:
    """A row of RL data: a number from `low` to `high`."""
    question = (
        f"{who} has a number from {low} to {high}. Guess it; the answer is {HIGHER} or {LOWER}."
    )
    extra = {"split": split, "index": index, "low": low, "high": high}
    return {**rl_row("guessing", question, str(secret), extra), "ability": "game"}


def guessing_demonstration(
    row: Row,
    draw: random.Random | None = None,
    careless: float = 0.0,
    max_turns: int = 100,
) -> list[Message]:
    """The turns of a game after its prompt: bisection, or guesses that are drawn.

    Drawn ones stay within what is left, but for a share `careless`, which are any of the game's.
    """
    first, last = int(row["extra_info"]["low"]), int(row["extra_info"]["high"])
    secret, low, high = int(row["reward_model"]["ground_truth"]), first, last
    turns: list[Message] = []
    while True:
        guess = (low + high) // 2
        if draw is not None:
            anywhere = draw.random() < careless
            guess = draw.randint(first, last) if anywhere else draw.randint(low, high)
        turns.append({"role": "assistant", "content": str(guess)})
        if guess == secret or len(turns) > 2 * (max_turns - 1):
            return turns
        turns.append({"role": "user", "content": HIGHER if guess < secret else LOWER})
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))


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
