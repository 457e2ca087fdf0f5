"""Which test prompts were trained on: the same words, or most of their runs of n words.

Texts are compared as words without case and punctuation. The n-grams kept in memory are those of
the test set, so the training set may be of any size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from engine.errors import DataError

_WORD = re.compile(r"\w+")


def trained_on(
    test: Sequence[str], training: Iterable[str], ngram: int, overlap: float
) -> list[bool]:
    """Tell of each test text (N of them) whether the training texts contain it.

    A text counts when one training text has the same words, or when at least `overlap` (0 to 1) of
    its distinct runs of `ngram` words occur in the training texts (Brown et al. 2020,
    arXiv:2005.14165, app. C). A text of fewer words has none and counts by its whole alone.
    """
    texts = [words(text) for text in test]
    runs = [set(_runs(text, ngram)) for text in texts]
    wanted = set().union(*runs) if runs else set()
    whole = set(texts)
    seen: set[tuple[str, ...]] = set()
    same: set[tuple[str, ...]] = set()
    for line in training:
        text = words(line)
        if text in whole:
            same.add(text)
        seen.update(run for run in _runs(text, ngram) if run in wanted)
    return [
        text in same or (bool(own) and len(own & seen) >= overlap * len(own))
        for text, own in zip(texts, runs, strict=True)
    ]


def share_trained_on(
    test: Sequence[str], training: Iterable[str], ngram: int, overlap: float
) -> float:
    """Return the share (0 to 1) of test texts that the training texts contain; see `trained_on`."""
    if not test:
        raise DataError("there are no test prompts to look for in the training data")
    return sum(trained_on(test, training, ngram, overlap)) / len(test)


def words(text: str) -> tuple[str, ...]:
    """Return a text's words without case and punctuation."""
    return tuple(_WORD.findall(text.casefold()))


def _runs(text: tuple[str, ...], ngram: int) -> Iterable[tuple[str, ...]]:
    return (text[i : i + ngram] for i in range(len(text) - ngram + 1))
