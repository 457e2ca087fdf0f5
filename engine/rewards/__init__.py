"""What a completion is worth: the reward protocol, its registry, rules, and the guarded call."""

from engine.rewards.answer_match import extract_answer, has_format, normalise_number
from engine.rewards.components import ordered_weights
from engine.rewards.protocol import RewardFunction
from engine.rewards.registry import declared_components, register_reward, resolve_reward
from engine.rewards.result import RewardFailure, Scores
from engine.rewards.runner import score

__all__ = [
    "RewardFailure",
    "RewardFunction",
    "Scores",
    "declared_components",
    "extract_answer",
    "has_format",
    "normalise_number",
    "ordered_weights",
    "register_reward",
    "resolve_reward",
    "score",
]
