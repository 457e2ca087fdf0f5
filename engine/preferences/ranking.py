"""Which completions of a prompt become pairs: the best with the worst, by a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A completion with its reward."""

    text: str
    score: float  # e.g. 1.0
    usable: bool = True  # false: cut off, empty, or the reward failed


def ranked_pairs(
    group: Sequence[ScoredText], margin: float, most: int = 1
) -> list[tuple[ScoredText, ScoredText]]:
    """Up to `most` pairs (chosen, rejected) of a prompt's completions, disjoint.

    The best is paired with the worst, the next best with the next worst and so on, as long as their
    scores differ by `margin` or more and their texts differ. Of equal ones the earlier sampled
    comes first. Unusable ones are left out: a text that was cut off would be taught as finished.

    >>> group = [ScoredText("4", 0.0), ScoredText("5", 1.0), ScoredText("6", 0.2)]
    >>> [(a.text, b.text) for a, b in ranked_pairs(group, margin=0.5)]
    [('5', '4')]
    """
    usable = [one for one in group if one.usable]
    best = sorted(usable, key=lambda one: -one.score)  # stable, so that equal ones keep their order
    worst = sorted(usable, key=lambda one: one.score)
    pairs = zip(best[: len(usable) // 2], worst, strict=False)
    return [
        (good, bad)
        for good, bad in list(pairs)[:most]
        if good.score - bad.score >= margin and good.text != bad.text
    ]
