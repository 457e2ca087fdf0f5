"""Environments without sense that tests play: rewards are shares of digits, answers are digits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from engine.agents.protocol import Action, Observation
from engine.agents.registry import register_environment


@register_environment("digit_game")
class DigitGame:
    """So many turns; each earns its share of digits, and the next one is asked by a number."""

    def __init__(self, *, turns: int = 3, delay: float = 0.0) -> None:
        self.turns, self.delay, self.turn, self.closed = turns, delay, 0, False

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.turn = 0
        return Observation()

    async def step(self, action: Action) -> Observation:
        await asyncio.sleep(self.delay)
        self.turn += 1
        share = sum(c.isdigit() for c in action.text) / max(1, len(action.text))
        answer = {"role": "user", "content": str(self.turn)}
        done = self.turn == self.turns
        return Observation((answer,), share, done, {"digits": share > 0.5})

    async def close(self) -> None:
        self.closed = True


@register_environment("faulty_game")
class FaultyGame(DigitGame):
    """A digit game that in its second turn hangs, raises, or lies."""

    def __init__(self, *, fault: str = "raise") -> None:
        super().__init__(turns=2)
        self.fault = fault

    async def step(self, action: Action) -> Observation:
        answer = await super().step(action)
        if self.turn < 2:
            return answer
        if self.fault == "hang":
            await asyncio.sleep(60)
        if self.fault == "raise":
            raise ZeroDivisionError("the dice fell off the table")
        if self.fault == "lie":
            return Observation(reward=float("nan"))
        return "nonsense"  # type: ignore[return-value]


@register_environment("sometimes_faulty_game")
class SometimesFaulty(DigitGame):
    """Raises in the last turn where that has a number of characters that 3 divides."""

    async def step(self, action: Action) -> Observation:
        answer = await super().step(action)
        if answer.done and len(action.text) % 3 == 0:
            raise ZeroDivisionError("the dice fell off the table")
        return answer
