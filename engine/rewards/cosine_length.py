"""The cosine reward: a short right answer is worth more, a short wrong one less.

Yeo et al. 2025 (arXiv:2502.03373), with the values of open-r1. DAPO's penalty near the limit of
tokens is `reward.overlong_buffer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from engine.errors import RewardError
from engine.rewards.registry import declared_components, register_reward, resolve_reward


def least_of_right(
    right: tuple[float, float] = (1.0, 0.5), wrong: tuple[float, float] = (-1.0, -0.5)
) -> float:
    """The least score of a right answer; more than any of a wrong one, where they differ at all."""
    return max(min(right), math.nextafter(max(wrong), math.inf))


@register_reward("cosine_length", pooled=True, right_from=least_of_right)
def cosine_length(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    answer: str = "answer_match",
    max_length: int = 4000,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    **columns: Sequence[object],
) -> list[float]:
    """Score B completions by their length in characters.

    `answer` is the reward that says which are right; `right` and `wrong` are the scores of an
    empty completion and of one of `max_length` characters or more. Raises RewardError for an
    `answer` that has components.
    """
    if ":" in answer or declared_components(answer) != ():
        raise RewardError(
            f"reward.options.answer={answer!r} is not one of the engine's rewards with one score"
        )
    if max_length < 1:
        raise RewardError(f"reward.options.max_length={max_length} must be at least 1")
    judge: Callable[..., Any] = resolve_reward(answer)
    marks = judge(prompts, completions, ground_truth=ground_truth, **columns)
    scores = []
    for text, mark in zip(completions, marks, strict=True):
        first, last = right if mark >= 1 else wrong
        share = min(len(text) / max_length, 1.0)
        scores.append(last + 0.5 * (first - last) * (1 + math.cos(share * math.pi)))
    return scores
