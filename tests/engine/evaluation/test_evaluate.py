"""Evaluation of a folder: one row a problem, the same each time, scored by the rule."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from tiny_engine import arithmetic_rows

from engine.config import EvaluateConfig
from engine.errors import DataError
from engine.evaluation.scoring import evaluate_model

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = EvaluateConfig(k=2, samples=3)


def table(folder: Path, seed: int = 0, **options: object) -> pd.DataFrame:
    return evaluate_model(
        folder,
        pd.DataFrame(arithmetic_rows(6)),
        "warm_start",  # type: ignore[arg-type]
        CONFIG,
        max_response_length=8,
        seed=seed,
        **options,  # type: ignore[arg-type]
    )


def test_one_row_a_problem_and_the_same_again(tiny_folder: Path) -> None:
    done: list[int] = []
    first = table(tiny_folder, on_progress=done.append)
    assert len(first) == 6
    assert done[-1] == 6 * (1 + 3)
    assert done == sorted(done)
    pd.testing.assert_frame_equal(first, table(tiny_folder))
    other = table(tiny_folder, seed=1)
    greedy = [c for c in first.columns if "greedy" in c or c in ("prompt", "ground_truth")]
    assert greedy
    pd.testing.assert_frame_equal(first[greedy], other[greedy])
    assert not first.equals(other), "another seed must give other samples"


def test_an_empty_split_is_refused(tiny_folder: Path) -> None:
    frame = pd.DataFrame(arithmetic_rows(1)).iloc[:0]
    with pytest.raises(DataError, match=r"no problems to evaluate on; check data\.test_size"):
        evaluate_model(tiny_folder, frame, "warm_start", CONFIG, max_response_length=4, seed=0)  # type: ignore[arg-type]
