"""An OpenEnv server with its own package: `PYTHON openenv_countdown.py PORT`.

Counts down from the seed; each step takes away the length of the message.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Said(Action):
    message: str


class Shown(Observation):
    text: str
    left: int = 0


class Countdown(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Shown:
        self.left = seed or 0
        return Shown(text=f"{self.left} left", left=self.left)

    def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Shown:
        if action.message == "fail":
            raise ValueError("no luck")
        self.left -= len(action.message)
        reward = float(len(action.message))
        return Shown(text=f"{self.left} left", left=self.left, reward=reward, done=self.left <= 0)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Countdown, Said, Shown, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
