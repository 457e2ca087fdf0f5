"""What a completion is worth: the reward protocol, its registry, rules, and the guarded call."""

from engine.rewards.answer_match import extract_answer, has_format, normalise_number
from engine.rewards.components import ordered_weights
from engine.rewards.opening import open_reward
from engine.rewards.protocol import RewardFunction
from engine.rewards.registry import declared_components, register_reward, resolve_reward
from engine.rewards.result import RewardFailure, Scores
from engine.rewards.runner import score
from engine.rewards.threads import RewardScorer, RewardThreads

__all__ = [
    "RewardFailure",
    "RewardFunction",
    "RewardScorer",
    "RewardThreads",
    "Scores",
    "declared_components",
    "extract_answer",
    "has_format",
    "normalise_number",
    "open_reward",
    "ordered_weights",
    "register_reward",
    "resolve_reward",
    "score",
]
