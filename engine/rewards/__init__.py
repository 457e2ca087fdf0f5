"""What a completion is worth: the reward protocol, its registry, rules, and the guarded call."""

from engine.rewards.calls import RewardScorer, RewardThreads, score
from engine.rewards.reward_function import (
    RewardFailure,
    RewardFunction,
    Scores,
    declared_components,
    ordered_weights,
    register_reward,
    resolve_reward,
)
from engine.rewards.scorer import Scorer, open_reward, require_rewards, scorer_identity

__all__ = [
    "RewardFailure",
    "RewardFunction",
    "RewardScorer",
    "RewardThreads",
    "Scorer",
    "Scores",
    "declared_components",
    "open_reward",
    "ordered_weights",
    "register_reward",
    "require_rewards",
    "resolve_reward",
    "score",
    "scorer_identity",
]
