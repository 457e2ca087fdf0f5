"""Two small models' completions to six problems, judged by the GSM8K mark."""

import pandas as pd
import pytest
from judged_completions import judged

from engine.evaluation.results import build_rows

TRUTHS = ["3", "14", "15", "92", "65", "35"]


@pytest.fixture
def problems():
    return pd.DataFrame(
        {
            "dataset": ["test"] * 6,
            "index": list(range(6)),
            "data_source": ["arithmetic"] * 6,
            "level": ["easy", "easy", "easy", "hard", "hard", "hard"],
            "prompt": [f"Question {i}: what is {truth} + 0?" for i, truth in enumerate(TRUTHS)],
            "ground_truth": TRUTHS,
        }
    )


@pytest.fixture
def make_rows(problems):
    """Rows of a model from its greedy answers `[6]` and sampled answers `[6][n]`."""

    def make(model, greedy, samples, problems=problems):
        first = [judged(a, t, 5 + i) for i, (a, t) in enumerate(zip(greedy, TRUTHS, strict=True))]
        each = [
            [judged(a, t, n) for a, n in zip(some, (4, 6, 8, 10), strict=False)]
            for some, t in zip(samples, TRUTHS, strict=True)
        ]
        return build_rows(model, problems, first, each)

    return make


@pytest.fixture
def before(make_rows):
    greedy = ["3", "0", None, "92", "0", "0"]  # right on problems 0 and 3
    samples = [
        ["3", "0", "0", "3"], ["0", "14", "0", None], [None] * 4,
        ["92"] * 4, ["1", "2", "65", "65"], [None, None, "35", None],
    ]  # fmt: skip
    return make_rows("warm_start", greedy, samples)


@pytest.fixture
def after(make_rows):
    greedy = ["3", "14", "15", "0", "65", None]  # right on 0, 1, 2, 4: fixes three, breaks one
    samples = [["3"] * 4, ["14", "14", "0", "14"], ["15"] * 4, ["92"] * 4, ["65"] * 4, ["0"] * 4]
    return make_rows("rl", greedy, samples)
