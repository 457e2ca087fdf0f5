"""Where a reward runs: the engine's own in this process, a user's in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from engine.errors import ConfigError
from engine.rewards.process import RewardProcess
from engine.rewards.registry import declared_components, resolve_reward, reward_module
from engine.rewards.threads import RewardScorer, RewardThreads

Isolation: TypeAlias = Literal["process", "none"]


def open_reward(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    isolation: Isolation = "process",
    plugins: tuple[str, ...] = (),
) -> RewardScorer:
    """Make the reward `name` ready to be called; close it when done.

    `plugins` are the modules that may register it. Raises ConfigError for a reward that can't be
    resolved, and RewardError for one whose module ends its process.
    """
    module = reward_module(name)
    if isolation == "none" or module.startswith("engine.rewards."):
        return RewardThreads(resolve_reward(name, options), declared_components(name))
    if module == "__main__":
        raise ConfigError(
            f"reward.name={name!r} is defined in the program that runs, which its own process "
            "can't import; move it into a module, or set reward.isolation=none"
        )
    return RewardProcess(name, options, (module, *plugins))
