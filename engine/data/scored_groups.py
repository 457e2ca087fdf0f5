"""Preference rows from a policy's own completions: groups of one prompt, scored by a reward.

The rows have the canonical form of `preference_rows`: a file of them is what `read_preferences` and
`read_reward_pairs` read. Sampling and scoring are elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import DataError
from engine.storage.json_rows import Row


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """What a policy answered, and what the reward said of it."""

    text: str  # e.g. "<<23+14=37>>37\n#### 37"
    score: float | None  # None, or NaN: the reward failed
    truncated: bool = False  # cut at the length limit: it has no end that could be learned


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The completions of one prompt."""

    prompt: Sequence[Mapping[str, object]]  # messages, e.g. [{"role": "user", "content": "1+1?"}]
    completions: Sequence[ScoredCompletion]
    extra_info: Mapping[str, object] = field(default_factory=dict)  # e.g. {"policy_version": 12}

    @property
    def usable(self) -> list[tuple[str, float]]:
        """Text and score of what can be learned from, in the order of sampling."""
        return [
            (one.text, float(one.score))
            for one in self.completions
            if one.score is not None
            and not math.isnan(one.score)
            and not one.truncated
            and one.text.strip()
        ]


def pairs_from_groups(
    groups: Iterable[ScoredGroup],
    *,
    pairs_per_group: int = 1,
    min_gap: float = 0.0,
    margins: bool = False,
) -> list[Row]:
    """The best and the worst completion of each group as chosen and rejected.

    With `pairs_per_group` also the second best and the second worst, and so on; each text is in one
    pair of a group at most. A pair's scores differ by more than `min_gap`; of equal ones the first
    counts. `margins` makes the difference the pair's `margin`, which the reward model's loss asks
    its scores to exceed; without it that is 0. Both scores are in `extra_info`. Raises DataError
    for a number of pairs below 1 or a negative gap.
    """
    if pairs_per_group < 1:
        raise DataError(f"pairs_per_group={pairs_per_group} must be 1 or more")
    if not min_gap >= 0:
        raise DataError(f"min_gap={min_gap} must be 0 or more")
    rows: list[Row] = []
    for group in groups:
        scores = _distinct(group.usable)
        best = sorted(scores, key=lambda text: -scores[text])  # stable: of equal ones the first
        worst = sorted(scores, key=lambda text: scores[text])
        count = min(pairs_per_group, len(scores) // 2)
        for chosen, rejected in zip(best[:count], worst[:count], strict=True):
            high, low = scores[chosen], scores[rejected]
            if high - low <= min_gap:
                break
            rows.append(
                {
                    "prompt": [dict(message) for message in group.prompt],
                    "chosen": chosen,
                    "rejected": rejected,
                    "margin": high - low if margins else 0.0,
                    "extra_info": {**group.extra_info, "chosen_score": high, "rejected_score": low},
                }
            )
    return rows


def labels_from_groups(
    groups: Iterable[ScoredGroup], *, threshold: float = 0.5, per_group: int = 0
) -> list[Row]:
    """Each completion with a label: good where its score is above `threshold`.

    Of each label at most `per_group` completions of a group (0: all), the first ones; each text
    once. For KTO, which needs no partner: a group that is all good, or all bad, counts as well.
    """
    rows: list[Row] = []
    for group in groups:
        taken = {True: 0, False: 0}
        for text, score in _distinct(group.usable).items():
            label = score > threshold
            taken[label] += 1
            if per_group and taken[label] > per_group:
                continue
            rows.append(
                {
                    "prompt": [dict(message) for message in group.prompt],
                    "completion": text,
                    "label": label,
                    "extra_info": {**group.extra_info, "score": score},
                }
            )
    return rows


def _distinct(scored: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Each text with the score that it got first."""
    found: dict[str, float] = {}
    for text, score in scored:
        found.setdefault(text, score)
    return found
