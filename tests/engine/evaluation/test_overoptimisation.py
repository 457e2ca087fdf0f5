"""Over-optimisation: read from a run's steps, said and drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from engine.evaluation import plots
from engine.evaluation.policy_steps import read_overoptimisation


def run(folder: Path, true: np.ndarray) -> Path:
    steps = len(true)
    frame = {
        "step": np.arange(1, steps + 1),
        "reward/reward_model": np.linspace(-1, 3, steps),
        "reward/correct": true,
        "actor/kl": np.linspace(0, 0.5, steps),
        "response/length_mean": np.full(steps, 20.0),
    }
    pd.DataFrame(frame).to_parquet(folder / "metrics.parquet")
    return folder


def test_a_true_reward_that_falls_while_the_model_s_rises(tmp_path: Path) -> None:
    true = np.concatenate([np.linspace(0.4, 0.9, 20), np.linspace(0.9, 0.3, 20)])
    found = read_overoptimisation(run(tmp_path, true))
    assert found is not None
    assert 18 <= found.peak <= 21
    at = found.metrics()
    assert at["overoptimisation/true_peak"] == pytest.approx(0.88, abs=0.03)
    assert at["overoptimisation/true_last"] < at["overoptimisation/true_peak"] - 0.4
    assert at["overoptimisation/kl_last"] == pytest.approx(10.0, abs=0.5), (
        "a completion, not a token"
    )
    assert f"its peak is {at['overoptimisation/true_peak']:.3f} at step {found.peak + 1} of 40" in (
        found.sentence()
    )
    drawn = plots.overoptimisation(found)
    assert drawn.startswith("<svg")
    assert plots.overoptimisation(found) == drawn


def test_one_that_rises_to_the_end(tmp_path: Path) -> None:
    found = read_overoptimisation(run(tmp_path, np.linspace(0.2, 0.9, 30)))
    assert found is not None
    assert found.sentence().endswith("it has its peak at the end")


def test_other_runs_have_none(tmp_path: Path) -> None:
    assert read_overoptimisation(tmp_path) is None
    pd.DataFrame({"step": [1], "reward/correct": [0.5]}).to_parquet(tmp_path / "metrics.parquet")
    assert read_overoptimisation(tmp_path) is None
