"""Two models' rows by source and level: every metric of both, and the gain.

Whole tables are compared in `summary`; here are their parts, as numbers and as lines of text.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from engine.evaluation.metrics import Interval, paired_bootstrap
from engine.evaluation.rows import check_paired
from engine.evaluation.summary import ModelSummary, model_summary


@dataclass(frozen=True, slots=True)
class Part:
    """Two models on the problems of one source, or of one level of it."""

    source: str
    level: str  # empty: all of the source
    problems: int
    before: ModelSummary
    after: ModelSummary
    gain: Interval | None  # of greedy pass@1, paired; None for a single problem

    def line(self) -> str:
        """One line, e.g. `gsm8k: pass@1 40.0% → 55.0% (+15.0 [+3.0, +27.0]), …`."""
        name = f"{self.source}, {self.level}" if self.level else self.source
        return f"{name}: {described(self.before, self.after, self.gain, self.problems)}"


_SHOWN = {
    "pass@1": "pass_at_1",
    "mean@k": "mean_at_k",
    "pass@k": "pass_at_k",
    "maj@k": "majority",
    "truncated": "truncated",
}


def described(
    before: ModelSummary, after: ModelSummary, gain: Interval | None, problems: int
) -> str:
    """Two models' rates: `pass@1 40.0% → 55.0% (+15.0 [+3.0, +27.0]), mean@k …; 60 problems`."""
    rates = [
        f"{label} {getattr(before, field).mean:.1%} → {getattr(after, field).mean:.1%}"
        for label, field in _SHOWN.items()
    ]
    if gain is not None:
        rates[0] += f" ({_points(gain.mean)} [{_points(gain.low)}, {_points(gain.high)}])"
    errors = before.errors + after.errors
    failed = f", {errors} not scored" if errors else ""
    return f"{', '.join(rates)}; {problems} problems{failed}"


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
        first, second = (
            model_summary(table, k, confidence, bootstrap_samples, seed) for table in (one, two)
        )
        return Part(source, level, len(one), first, second, gain)

    parts = []
    for source in sorted(set(before["data_source"])):
        here = before["data_source"] == source
        parts.append(part(str(source), "", here))
        levels = sorted(set(before["level"][here]) - {""})
        for level in levels if len(levels) > 1 else ():
            parts.append(part(str(source), str(level), here & (before["level"] == level)))
    return parts


def _points(fraction: float) -> str:
    return f"{100 * fraction + 0.0:+.1f}"
