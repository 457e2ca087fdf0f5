"""What the environment of an episode gave: the reward of multi-turn runs (docs/agents.md)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import RewardError
from engine.rewards.registry import register_reward

NAME = "environment"


@register_reward(NAME)
def environment(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    episode_reward: Sequence[float] | None = None,
    **columns: Sequence[object],
) -> list[float]:
    """The sum of each episode's rewards; raises RewardError without episodes.

    The reward role leaves each turn's part on that turn.
    """
    if episode_reward is None:
        raise RewardError(
            "reward.name=environment reads what an environment gave, and these completions are no "
            "episodes; set rollout.multi_turn.enable, or name another reward"
        )
    return [float(reward) for reward in episode_reward]
