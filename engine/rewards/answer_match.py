"""GSM8K's rule: 1 where the number after the last `####` equals the ground truth, else 0.

`method="flexible"` takes the last number of the text instead, whatever stands around it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Literal

from engine.errors import RewardError
from engine.rewards.registry import register_reward

_NUMBER = r"[-+]?\$?[-+]?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
# What follows must not continue the number: "1e5", "1/2" and "1.2.3" are not answers we can read.
_AFTER_MARK = re.compile(rf"[ \t]*({_NUMBER})(?![./:]?[0-9A-Za-z])")
_ANYWHERE = re.compile(rf"(?<![0-9A-Za-z.,]){_NUMBER}|(?<=[A-Za-z=(]){_NUMBER}")
_LAST_LINE = re.compile(rf"####[ \t]*{_NUMBER}[ \t]*")
_LONGEST = 64  # characters; no answer needs more, and a longer one must not cost time
_TAIL = 1000  # characters at the end in which `flexible` looks for the last number


def extract_answer(text: str, *, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """Return the number right after the last `####`, normalised, or None where there is none.

    `flexible`: the last number of the text, with its currency, unit or per cent left out.

    >>> extract_answer("<<600+634=1234>>1234\\n#### $1,234.")
    '1234'
    >>> extract_answer("So she pays $1,234.50 (or 5% less).", method="flexible")
    '5'
    """
    if method == "flexible":
        numbers = [found.group() for found in _ANYWHERE.finditer(text[-_TAIL:])]
        return normalise_number(numbers[-1]) if numbers else None
    _, mark, rest = text.rpartition("####")
    found = _AFTER_MARK.match(rest) if mark else None
    return normalise_number(found.group(1)) if found else None


def has_format(text: str) -> bool:
    """Whether the text ends with a line `#### <number>`, and has no other `####`."""
    last = text.rstrip().rpartition("\n")[2]
    return text.count("####") == 1 and _LAST_LINE.fullmatch(last) is not None


def normalise_number(text: str) -> str | None:
    """Drop dollar signs, commas, trailing dots and zeros; None where `text` is not a number."""
    text = text.strip()
    if len(text) > _LONGEST or not re.fullmatch(_NUMBER, text):
        return None
    digits = re.sub(r"[$,]", "", text)
    sign = "-" if digits.count("-") % 2 else ""
    plain = format(Decimal(digits.lstrip("+-")), "f")
    if "." in plain:
        plain = plain.rstrip("0").rstrip(".")
    plain = plain.lstrip("0") or "0"
    plain = "0" + plain if plain.startswith(".") else plain
    return plain if plain == "0" else sign + plain


@register_reward("answer_match", answer=extract_answer, well_formed=has_format)
def answer_match(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    method: Literal["strict", "flexible"] = "strict",
    **columns: Sequence[object],
) -> list[float]:
    """Score B completions 1.0 or 0.0; raise RewardError where a ground truth is not a number."""
    scores = []
    for i, (completion, truth) in enumerate(zip(completions, ground_truth, strict=True)):
        wanted = normalise_number(str(truth))
        if wanted is None:
            raise RewardError(
                f"ground_truth of row {i} is {truth!r}, not a number; answer_match compares "
                "numbers only, so correct the row or choose another reward.name"
            )
        scores.append(1.0 if extract_answer(completion, method=method) == wanted else 0.0)
    return scores
