"""The answer is the ground truth: letter by letter, or as SQuAD normalises both.

A ground truth that is a list is one of several right answers.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence

from engine.rewards.registry import register_reward

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def text_answer(text: str, *, after: str = "") -> str | None:
    """The text after the last `after`, stripped; None where `after` is not there.

    >>> text_answer("It rains. Answer: yes ", after="Answer:")
    'yes'
    """
    _, mark, rest = text.rpartition(after) if after else ("", "all", text)
    return rest.strip() if mark else None


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and doubled blanks (Rajpurkar et al. 2016).

    >>> normalised("The  Eiffel Tower!")
    'eiffel tower'
    """
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


@register_reward("exact_match", answer=text_answer)
def exact_match(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    after: str = "",
    **columns: Sequence[object],
) -> list[float]:
    """Score B completions 1.0 or 0.0: equal but for blanks around.

    With `after`, what follows the last `after` counts, e.g. "Answer:".
    """
    return _scores(completions, ground_truth, after, str.strip)


@register_reward("normalised_match", answer=text_answer)
def normalised_match(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    after: str = "",
    **columns: Sequence[object],
) -> list[float]:
    """As `exact_match`, both sides `normalised`."""
    return _scores(completions, ground_truth, after, normalised)


def _scores(
    completions: Sequence[str], truths: Sequence[object], after: str, form: Callable[[str], str]
) -> list[float]:
    scores = []
    for text, truth in zip(completions, truths, strict=True):
        answer = text_answer(text, after=after)
        several = truth if isinstance(truth, list | tuple) else [truth]
        wanted = {form(str(one)) for one in several}
        scores.append(float(answer is not None and form(answer) in wanted))
    return scores
