"""Environments that count, hang, die, raise and lie, for the pool's tests."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from engine.agents import Action, Observation, register_environment


@register_environment("by text of a test")
class ByText:
    """Does what the action's text says; its turns are counted."""

    def __init__(self, *, bonus: float = 0.0) -> None:
        self.bonus = bonus
        self.turns = 0
        self.episodes = 0

    def tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "f"}}]

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.turns, self.episodes = 0, self.episodes + 1
        if row.get("start") == "raise":
            raise ValueError("no such start")
        return Observation(({"role": "user", "content": str(row["start"])},))

    async def step(self, action: Action) -> Any:
        self.turns += 1
        word = action.text
        if word == "sleep":
            await asyncio.sleep(60)
        if word == "stubborn":
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    continue
        if word == "spin":
            while True:
                pass
        if word == "block":
            time.sleep(60)
        if word == "nap":
            await asyncio.sleep(0.5)
        if word == "catch":
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    continue
        if word == "hold":  # as code that hears no signal
            os.kill(os.getpid(), signal.SIGSTOP)
        if word == "exit":
            os._exit(7)
        if word == "leave":
            sys.exit(3)
        if word == "raise":
            raise RuntimeError("out of luck")
        if word == "lie":
            return {"reward": 1.0}
        if word == "nan":
            return Observation(reward=float("nan"))
        if word == "text":
            return Observation(("hello",))  # type: ignore[arg-type]
        if word == "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            return Observation(info={"child": child.pid})
        await asyncio.sleep(0)
        content = f"turn {self.turns} of episode {self.episodes}"
        info = {"pid": os.getpid(), "thing": object()}
        messages = ({"role": "user", "content": content},)
        return Observation(messages, self.bonus + self.turns, word == "end", info)

    async def close(self) -> None:
        self.turns = -1

    def get_state(self) -> object:
        return self.turns

    def set_state(self, state: Any) -> None:
        self.turns = state


class Broken:
    def __init__(self) -> None:
        raise OSError("no licence")

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        return Observation()

    async def step(self, action: Action) -> Observation:
        return Observation()

    async def close(self) -> None:
        return None
