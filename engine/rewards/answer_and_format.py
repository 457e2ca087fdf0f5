"""GSM8K's rule in two parts: a right answer, and an answer line where it belongs."""

from __future__ import annotations

from collections.abc import Sequence

from engine.rewards.answer_match import answer_match, extract_answer, has_format
from engine.rewards.registry import register_reward


@register_reward(
    "answer_and_format",
    components=("answer", "format"),
    answer=extract_answer,
    well_formed=has_format,
)
def answer_and_format(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    **columns: Sequence[object],
) -> dict[str, list[float]]:
    """Give B completions 1.0 or 0.0 for `answer` (see `answer_match`) and for `format`.

    `format` is 1.0 where the text ends with its only `#### <number>` line, right or wrong. Raises
    RewardError where a ground truth is not a number.
    """
    return {
        "answer": answer_match(prompts, completions, ground_truth=ground_truth),
        "format": [float(has_format(text)) for text in completions],
    }
