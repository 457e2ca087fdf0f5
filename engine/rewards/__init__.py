"""What a completion is worth: the reward protocol, its registry, rules, and the guarded call."""

from engine.rewards.answer_match import extract_answer, has_format, normalise_number
from engine.rewards.protocol import RewardFunction
from engine.rewards.registry import register_reward, resolve_reward
from engine.rewards.runner import score

__all__ = [
    "RewardFunction",
    "extract_answer",
    "has_format",
    "normalise_number",
    "register_reward",
    "resolve_reward",
    "score",
]
