"""The steps of the RL run that made a model, as its artifact records them in `metrics.parquet`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from engine.errors import DataError

FILE, MODEL, SCORE = "metrics.parquet", "model", "validation/reward"


@dataclass(frozen=True, slots=True)
class PolicySteps:
    """An RL run's steps, and which of them the model is of."""

    rows: pd.DataFrame  # a row a step, with the metrics that it logged
    row: int  # position of the model's step

    @property
    def until_model(self) -> pd.DataFrame:
        """The steps that the model has learned from."""
        return self.rows[: self.row + 1]

    def __str__(self) -> str:
        """E.g. `step 40 of 80, validation reward 0.812`."""
        score = float(self.rows[SCORE].iloc[self.row]) if SCORE in self.rows else math.nan
        shown = f", validation reward {score:.3f}" if math.isfinite(score) else ""
        return f"step {self.row + 1} of {len(self.rows)}{shown}"


def read_policy_steps(policy: Path) -> PolicySteps | None:
    """Read the steps of a model's folder; None for a model that no RL run made.

    Without the column `model` it is of the last step. Raises DataError where that column names no
    step.
    """
    path = policy / FILE
    if not path.is_file():
        return None
    rows = pd.read_parquet(path)
    if rows.empty:
        return None
    if MODEL not in rows:
        return PolicySteps(rows, len(rows) - 1)
    chosen = np.flatnonzero(rows[MODEL].to_numpy(bool))
    if not len(chosen):
        raise DataError(f"{path}: no step is marked as the model's; run RL again")
    return PolicySteps(rows, int(chosen[-1]))
