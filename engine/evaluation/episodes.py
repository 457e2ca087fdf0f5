"""Episodes in an evaluation: two models' turns, returns and calls compared.

They are played in `engine.workers.episode_evaluation`, and judged in `judging`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from engine.evaluation.metrics import Interval, mean_interval, paired_bootstrap, rate_interval
from engine.evaluation.rows import EPISODE_COLUMNS

Column = tuple[str, str, Literal["share", "number"]]
_MEASURED: tuple[Column, ...] = (
    ("turns, greedy", "greedy_turns", "number"),
    ("return, greedy", "greedy_return", "number"),
    ("called a tool, greedy", "greedy_called", "share"),
    ("malformed calls, greedy", "greedy_malformed", "number"),
    ("turns, sampled", "sample_turns", "number"),
    ("return, sampled", "sample_return", "number"),
    ("called a tool, sampled", "sample_called", "share"),
    ("malformed calls, sampled", "sample_malformed", "number"),
)


@dataclass(frozen=True, slots=True)
class EpisodeMeasure:
    """A mean over the episodes of two models, with intervals; its change is paired."""

    name: str  # e.g. "turns, greedy"
    kind: Literal["share", "number"]
    before: Interval
    after: Interval
    change: Interval

    def line(self) -> str:
        """E.g. `turns, greedy 6.10 → 4.20 (-1.90 [-2.10, -1.70])`."""
        change = self.change
        if self.kind == "share":
            means = f"{self.before.mean:.1%} → {self.after.mean:.1%}"
            found = [f"{100 * v + 0.0:+.1f}" for v in (change.mean, change.low, change.high)]
        else:
            means = f"{self.before.mean:.2f} → {self.after.mean:.2f}"
            found = [f"{v + 0.0:+.2f}" for v in (change.mean, change.low, change.high)]
        return f"{self.name} {means} ({found[0]} [{found[1]}, {found[2]}])"


def compare_episodes(
    before: pd.DataFrame, after: pd.DataFrame, confidence: float, samples: int, seed: int
) -> list[EpisodeMeasure]:
    """Two models' rows of the same problems; empty where these are no episodes.

    Measures of tools are left out where neither model called any.
    """
    if any(name not in table for table in (before, after) for name in EPISODE_COLUMNS):
        return []
    old, new = _measured(before), _measured(after)
    tools = [name for name in old if "called" in name or "malformed" in name]
    without = all(not table[name].any() for table in (old, new) for name in tools)
    measures = []
    for label, name, kind in _MEASURED:
        if without and name in tools:
            continue
        one, two = (
            rate_interval(table[name], confidence, samples, seed)
            if kind == "share"
            else mean_interval(table[name], confidence, samples, seed)
            for table in (old, new)
        )
        change = paired_bootstrap(old[name], new[name], confidence, samples, seed)
        measures.append(EpisodeMeasure(label, kind, one, two, change))
    return measures


def _measured(rows: pd.DataFrame) -> dict[str, np.ndarray]:
    called = {"greedy_called": rows["greedy_calls"] > 0}
    return {
        name: called.get(name, rows.get(name)).to_numpy(float)  # type: ignore[union-attr]
        for _, name, _ in _MEASURED
    }
