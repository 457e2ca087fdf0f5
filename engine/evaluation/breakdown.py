"""Two models' rows by source and level: greedy, sampled and majority scores, length, truncation.

Whole tables are compared in `summary`; here are their parts, as numbers and as lines of text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from engine.evaluation.metrics import Interval, paired_bootstrap, pass_at_k
from engine.evaluation.rows import check_paired


@dataclass(frozen=True, slots=True)
class Scores:
    """One model's scores on some problems; rates are fractions."""

    pass_at_1: float  # greedy
    mean_at_k: float  # of all samples: the share that is right
    pass_at_k: float  # unbiased estimate
    majority_at_k: float
    score: float  # mean score of greedy completions
    tokens: float  # of a greedy completion
    truncated: float  # share of greedy completions at the limit of tokens
    format_rate: float  # of the samples
    errors: int  # completions that could not be scored


@dataclass(frozen=True, slots=True)
class Part:
    """Two models on the problems of one source, or of one level of it."""

    source: str
    level: str  # empty: all of the source
    problems: int
    before: Scores
    after: Scores
    gain: Interval | None  # of greedy pass@1, paired; None for a single problem

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return asdict(self)

    def line(self) -> str:
        """One line, e.g. `gsm8k: pass@1 40.0% → 55.0% (+15.0 [+3.0, +27.0]), …`."""
        name = f"{self.source}, {self.level}" if self.level else self.source
        gain = self.gain
        ends = (
            f" ({_points(gain.mean)} [{_points(gain.low)}, {_points(gain.high)}])" if gain else ""
        )
        one, two = self.before, self.after
        shown = [
            f"{label} {getattr(one, field):.1%} → {getattr(two, field):.1%}"
            for label, field in _SHOWN.items()
        ]
        shown[0] += ends
        failed = f", {one.errors + two.errors} not scored" if one.errors + two.errors else ""
        return f"{name}: {', '.join(shown)}; {self.problems} problems{failed}"


_SHOWN = {
    "pass@1": "pass_at_1",
    "mean@k": "mean_at_k",
    "pass@k": "pass_at_k",
    "maj@k": "majority_at_k",
    "truncated": "truncated",
}


def breakdown(
    before: pd.DataFrame,
    after: pd.DataFrame,
    k: int,
    confidence: float,
    bootstrap_samples: int,
    seed: int,
) -> list[Part]:
    """The parts of two models' rows: each source, then each of its levels, where it has several.

    Raises DataError where the rows are not of the same problems.
    """
    check_paired(before, after)
    before, after = before.reset_index(drop=True), after.reset_index(drop=True)

    def part(source: str, level: str, rows: pd.Series) -> Part:
        one, two = before[rows], after[rows]
        old, new = (table["greedy_correct"].to_numpy(float) for table in (one, two))
        gain = (
            paired_bootstrap(old, new, confidence, bootstrap_samples, seed)
            if len(one) > 1
            else None
        )
        return Part(source, level, len(one), scores(one, k), scores(two, k), gain)

    parts = []
    for source in sorted(set(before["data_source"])):
        here = before["data_source"] == source
        parts.append(part(str(source), "", here))
        levels = sorted(set(before["level"][here]) - {""})
        for level in levels if len(levels) > 1 else ():
            parts.append(part(str(source), str(level), here & (before["level"] == level)))
    return parts


def scores(rows: pd.DataFrame, k: int) -> Scores:
    """One model's scores on the problems of `rows`, at least one."""
    right, samples = rows["samples_correct"].to_numpy(), rows["samples"].to_numpy()
    return Scores(
        pass_at_1=float(rows["greedy_correct"].mean()),
        mean_at_k=float((right / samples).mean()),
        pass_at_k=float(pass_at_k(samples, right, k).mean()),
        majority_at_k=float(rows["majority_correct"].mean()),
        score=float(rows["greedy_score"].mean()),
        tokens=float(rows["greedy_length"].mean()),
        truncated=float(rows["greedy_truncated"].mean()),
        format_rate=float(rows["format_rate"].mean()),
        errors=int(rows["errors"].sum()),
    )


def _points(fraction: float) -> str:
    return f"{100 * fraction + 0.0:+.1f}"
