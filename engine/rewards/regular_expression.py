"""A regular expression: 1 where it is found, and where what it reads is the ground truth.

An expression can take any time on a text, so it runs in a pool's process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.errors import RewardError
from engine.rewards.registry import register_reward


@register_reward("regular_expression", pooled=True)
def regular_expression(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    pattern: str = "",
    **columns: Sequence[object],
) -> list[float]:
    """Score B completions 1.0 or 0.0.

    Where `pattern` has a group `(?P<answer>…)`, what its last match reads must equal the ground
    truth, but for blanks around. Raises RewardError for a pattern that is none.
    """
    if not pattern:
        raise RewardError("regular_expression looks for nothing; set reward.options.pattern")
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise RewardError(f"reward.options.pattern={pattern!r} is no pattern: {error}") from None
    pairs = zip(completions, ground_truth, strict=True)
    return [float(_matches(wanted, text, truth)) for text, truth in pairs]


def _matches(wanted: re.Pattern[str], text: str, truth: object) -> bool:
    if "answer" not in wanted.groupindex:
        return wanted.search(text) is not None
    last = None
    for last in wanted.finditer(text):  # noqa: B007 (the last one counts)
        pass
    read = last["answer"] if last else None
    return read is not None and read.strip() == str(truth).strip()
