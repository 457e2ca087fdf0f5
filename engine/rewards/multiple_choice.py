"""The letter of a multiple choice: 1 where it is the ground truth's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.errors import RewardError
from engine.rewards.boxed import last_boxed
from engine.rewards.registry import register_reward

_TAIL = 2000  # characters at the end that are searched
_SAID = re.compile(
    r"(?i:answer|choice|option)\b[\s:*]{0,8}(?:(?i:is)\b[\s:*]{0,8})?[(\[]?([A-Z])\b"
)
_LETTER = re.compile(r"(?<![A-Za-z'])\(?([A-Z])\)?(?![A-Za-z'])")


def choice(text: str) -> str | None:
    """The letter that a text settles on: boxed, after "answer", or the last that stands alone.

    >>> choice("Not A, since … so the answer is (C)."), choice("B"), choice("Choice: **D**")
    ('C', 'B', 'D')
    """
    boxed = last_boxed(text)
    if boxed is not None:
        text = re.sub(r"\\[a-z]+", " ", boxed)
    tail = text[-_TAIL:]
    found = _SAID.findall(tail) or _LETTER.findall(tail)
    return found[-1] if found else None


@register_reward("multiple_choice", answer=choice)
def multiple_choice(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    **columns: Sequence[object],
) -> list[float]:
    """Score B completions 1.0 or 0.0.

    A ground truth is a letter, or the place of the right choice from 0. Raises RewardError where
    it is neither.
    """
    pairs = zip(completions, ground_truth, strict=True)
    return [float(choice(text) == _letter(truth, i)) for i, (text, truth) in enumerate(pairs)]


def _letter(truth: object, row: int) -> str:
    written = str(truth).strip().strip("().").upper()
    if written.isascii() and written.isdigit() and int(written[:3]) < 26:
        return chr(ord("A") + int(written[:3]))
    if len(written) == 1 and "A" <= written <= "Z":
        return written
    raise RewardError(
        f"ground_truth of row {row} is {truth!r}; multiple_choice needs a letter from A to Z, or "
        "the place of the right choice, from 0"
    )
