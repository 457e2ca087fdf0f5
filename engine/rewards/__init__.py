"""What a completion is worth: the reward protocol, its registry, rules, and the guarded call."""

from engine.rewards.components import ordered_weights
from engine.rewards.opening import open_reward
from engine.rewards.protocol import RewardFunction
from engine.rewards.registry import declared_components, register_reward, resolve_reward
from engine.rewards.result import RewardFailure, Scores
from engine.rewards.runner import score
from engine.rewards.scorer import Scorer, require_rewards, scorer_identity
from engine.rewards.threads import RewardScorer, RewardThreads

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
