"""Where a reward runs: in this process, in a pool of processes, or in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from engine.errors import ConfigError
from engine.rewards.pool import RewardPool
from engine.rewards.process import RewardProcess
from engine.rewards.registry import (
    declared_components,
    registered_reward,
    resolve_reward,
    reward_module,
)
from engine.rewards.threads import RewardScorer, RewardThreads

Isolation: TypeAlias = Literal["process", "none"]


def open_reward(
    name: str,
    options: Mapping[str, object] | None = None,
    *,
    isolation: Isolation = "process",
    plugins: tuple[str, ...] = (),
    processes: int = 0,
    sample_timeout_s: float = 5.0,
) -> RewardScorer:
    """Make the reward `name` ready to be called; close it when done.

    The engine's own run in this process, or in a pool where they are registered for one; a user's
    in its own process. `plugins` are the modules that may register it. Raises ConfigError for a
    reward that can't be resolved, and RewardError for one whose module ends its process.
    """
    module = reward_module(name)
    if module.startswith("engine.rewards."):
        function, entry = resolve_reward(name, options), registered_reward(name)
        if entry is None or not entry.pooled:
            return RewardThreads(function, declared_components(name))
        return RewardPool(
            name,
            options,
            module,
            components=entry.components,
            imports=entry.imports,
            processes=processes,
            sample_timeout_s=sample_timeout_s,
        )
    if isolation == "none":
        return RewardThreads(resolve_reward(name, options), declared_components(name))
    if module == "__main__":
        raise ConfigError(
            f"reward.name={name!r} is defined in the program that runs, which its own process "
            "can't import; move it into a module, or set reward.isolation=none"
        )
    return RewardProcess(name, options, (module, *plugins))
