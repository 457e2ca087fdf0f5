"""Environments without sense that tests play: rewards are shares of digits, answers are digits."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from engine.agents.call_parsers import ParsedTurn, register_call_parser
from engine.agents.environment_protocol import Action, Observation, ToolCall, register_environment


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


class LongGame(DigitGame):
    """A digit game that begins with a prompt of its own, longer than the rows'."""

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        await super().reset(row)
        return Observation(({"role": "user", "content": "1+2=" * 6},))


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


class SometimesGone(DigitGame):
    """Hangs, or ends its process, in the last turn of an episode whose prompt begins so."""

    def __init__(self, *, fault: str = "hang", prompt: str = "3") -> None:
        super().__init__()
        self.fault, self.prompt, self.bad = fault, prompt, False

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.bad = row["prompt"][0]["content"].startswith(self.prompt)
        return await super().reset(row)

    async def step(self, action: Action) -> Observation:
        answer = await super().step(action)
        if answer.done and self.bad and self.fault == "die":
            os._exit(1)
        if answer.done and self.bad:
            time.sleep(60)
        return answer


@register_environment("noted_game")
class NotedGame(DigitGame):
    """A digit game that notes what all games were asked, in the file NOTED_GAMES too."""

    resets: ClassVar[list[str]] = []
    steps: ClassVar[int] = 0

    name = ""

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.name = row["prompt"][0]["content"]
        self.resets.append(self.name)
        self.note("reset")
        return await super().reset(row)

    async def step(self, action: Action) -> Observation:
        NotedGame.steps += 1
        self.note("step")
        return await super().step(action)

    def note(self, what: str) -> None:
        if path := os.environ.get("NOTED_GAMES"):
            with Path(path).open("a") as file:
                file.write(f"{what} {self.name} {self.turn}\n")


@register_environment("saved_game")
class SavedGame(NotedGame):
    """A noted game that can be saved between turns."""

    def get_state(self) -> dict[str, Any]:
        return {"turn": self.turn, "name": self.name}

    def set_state(self, state: dict[str, Any]) -> None:
        self.turn, self.name = state["turn"], state["name"]


class UnsavableGame(SavedGame):
    """A game whose state can't be pickled."""

    def get_state(self) -> Any:
        return lambda: None


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class HostileGame(DigitGame):
    """A digit game with a tool, whose answers are markup; `digit_calls` reads what it is told."""

    def tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "digits", "parameters": {}}}]

    async def step(self, action: Action) -> Observation:
        seen = await super().step(action)
        told = {"role": "user", "content": f"{HOSTILE} {self.turn}"}
        return Observation((told,), seen.reward, seen.done, {"note": HOSTILE, **seen.info})


@register_call_parser("digit_calls")
def digit_calls(text: str) -> ParsedTurn:
    """A call where a turn has digits; else one that can't be read, in the turn's own words."""
    found = "".join(c for c in text if c.isdigit())
    if found:
        return ParsedTurn(text, (ToolCall("<b>digits</b>", {"found": found}),))
    return ParsedTurn(text, (), (f"no digits in {text!r} <i>at all</i>",))
