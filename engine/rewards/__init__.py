"""What a completion is worth: reward functions by name, and calls of them that can't hang a run.

Read `reward_function` first: what a reward is and what it returns. `scorer` is what trainers and
evaluation use, `calls` calls a function on threads or in processes of its own.
`answers`, `code` (with `sandbox`), `http_rewards` and `model_based` are the rewards.
"""
# ruff: noqa: F401  # what other rooms import

from engine.rewards.calls import RewardThreads, score
from engine.rewards.reward_function import (
    Scores,
    declared_components,
    register_reward,
    resolve_reward,
)
from engine.rewards.scorer import (
    Scorer,
    open_reward,
    require_rewards,
    scorer_identity,
    scorer_label,
)
