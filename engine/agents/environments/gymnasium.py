"""Environments with Gymnasium's interface, in text: `reset(seed=…)`, and `step` in five parts.

The package `gymnasium` is needed, and loaded, only where an environment is named by its id.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.agents.protocol import Action, Message, Observation
from engine.agents.registry import register_environment
from engine.errors import ConfigError

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@register_environment("gymnasium")
class GymnasiumEnvironment:
    """What it shows is a user's message; the policy's text becomes one of its actions.

    The row's prompt comes first, then the first observation, where the row has a prompt. The seed
    is the row's `extra_info.seed`, or its `index`, so that a group plays one episode.
    """

    def __init__(
        self,
        *,
        id: str = "",
        arguments: Mapping[str, object] | None = None,
        actions: Sequence[str] = (),
        show: str = "",
        read: str = "",
        max_turns: int = 50,
        invalid_reward: float = 0.0,
    ) -> None:
        """`id` is one of Gymnasium's, or `package.module:Class`; `arguments` are given to it.

        `actions` are words for the actions 0, 1, …: the last one that a turn names counts. Without
        them it is the turn's last number, or the text where the action space is one of text.
        `show` and `read` replace this, as `package.module:function`: an observation to text, and a
        text to an action (ValueError for none). A turn without an action is told so, and earns
        `invalid_reward`.
        """
        if not id or max_turns < 1:
            raise ConfigError(
                "environment 'gymnasium' needs options.id, and max_turns of at least 1"
            )
        self._env: Any = _made(id, dict(arguments or {}))
        self._actions = [one.lower() for one in actions]
        self._show: Callable[[object], object] = _function(show) if show else str
        self._read = _function(read) if read else self._action_of
        self._max_turns, self._invalid_reward = max_turns, invalid_reward
        self._turns = 0

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        about = row.get("extra_info") or {}
        seed = about.get("seed", about.get("index"))
        seen, info = self._env.reset(seed=None if seed is None else int(seed))
        self._turns = 0
        prompt: list[Message] = [dict(one) for one in row.get("prompt") or ()]
        return Observation((*prompt, self._message(seen)), info=dict(info))

    async def step(self, action: Action) -> Observation:
        self._turns += 1
        cut = self._turns >= self._max_turns
        try:
            chosen = self._read(action.text)
        except ValueError as error:
            told = {"role": "user", "content": f"That is no action: {error}"}
            return Observation((told,), self._invalid_reward, cut, {"invalid": True})
        seen, reward, terminated, truncated, info = self._env.step(chosen)
        done = bool(terminated or truncated) or cut
        told_info = {**dict(info), "terminated": bool(terminated), "turns": self._turns}
        return Observation((self._message(seen),), float(reward), done, told_info)

    async def close(self) -> None:
        self._env.close()

    def _message(self, seen: object) -> Message:
        return {"role": "user", "content": str(self._show(seen))}

    def _action_of(self, text: str) -> str | int | float:
        if self._actions:
            places = {text.lower().rfind(word): i for i, word in enumerate(self._actions)}
            last = max(places)
            if last < 0:
                raise ValueError(f"name one of {', '.join(self._actions)}")
            return places[last]
        space = getattr(self._env, "action_space", None)
        if type(space).__name__ == "Text":
            return text
        numbers = _NUMBER.findall(text)
        if not numbers:
            raise ValueError("give a number")
        whole = type(space).__name__ == "Discrete"
        value = int(float(numbers[-1])) if whole or "." not in numbers[-1] else float(numbers[-1])
        if whole and not space.contains(value):  # type: ignore[union-attr]
            raise ValueError(f"{value} is not in {space}")
        return value


def _made(name: str, arguments: Mapping[str, Any]) -> Any:
    if ":" in name:
        return _function(name)(**arguments)
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"rollout.agent.environment.options.id={name!r} needs the package gymnasium; install "
            "hybridflyte[gymnasium], or name a class as package.module:Class"
        ) from error
    try:
        return gymnasium.make(name, **arguments)
    except (gymnasium.error.Error, TypeError) as error:
        raise ConfigError(
            f"rollout.agent.environment.options.id={name!r} can't be made ({error})"
        ) from error


def _function(path: str) -> Callable[..., object]:
    """What stands at `package.module:attribute`."""
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"rollout.agent.environment.options: {path!r} can't be imported ({error})"
        ) from error
    if not callable(found):
        raise ConfigError(
            f"rollout.agent.environment.options: {path!r} is {found!r}, which can't be called"
        )
    return found
