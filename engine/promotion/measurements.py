"""What the rules need: measured on evaluation rows, RL's metrics and the training data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from engine.config import EvaluateConfig, GuardConfig, PromoteConfig
from engine.data.rows import prompt_text
from engine.errors import DataError
from engine.evaluation.metrics import Interval, paired_bootstrap, wilson_interval
from engine.evaluation.policy_steps import read_policy_steps
from engine.evaluation.rows import check_paired
from engine.evaluation.sets import ALL, rows_of_set, set_names
from engine.promotion.contamination import share_trained_on
from engine.promotion.rules import Measurements

TRAINING_SPLITS = ("sft_train", "train")
LAST_STEPS = 0.1  # share of RL's steps whose KL counts
KL_COLUMN = "actor/kl"


def measure(
    before: pd.DataFrame,
    after: pd.DataFrame,
    against: Literal["champion", "warm_start", "start_model"],
    *,
    dataset: str,
    policy: Path,
    datasets: Iterable[Path],
    rules: PromoteConfig,
    evaluate: EvaluateConfig,
    seed: int,
    approved_by: str = "",
) -> Measurements:
    """Measure a new model (`after`) against another (`before`), rows as of `evaluation.rows`.

    dataset: the evaluation set that is measured; guards see the others, too. policy: the new
    model's artifact. datasets: all dataset artifacts that it descends from. Raises DataError where
    the rows are not of the same problems, or have none of the set.
    """
    check_paired(before, after)

    def change(old: np.ndarray, new: np.ndarray) -> Interval:
        return paired_bootstrap(old, new, evaluate.confidence, evaluate.bootstrap_samples, seed)

    guards: dict[str, Interval | None] = {}
    for guard in rules.guards:
        was, is_now = _guarded(before, guard), _guarded(after, guard)
        # One problem has no spread, so its interval would claim certainty.
        guards[guard.name] = change(was, is_now) if len(is_now) > 1 else None
    before, after = rows_of_set(before, dataset), rows_of_set(after, dataset)
    ratio = None
    if rules.max_length_ratio is not None:
        ratio = length_ratio(
            before["response_length"].to_numpy(float),
            after["response_length"].to_numpy(float),
            evaluate.confidence,
            evaluate.bootstrap_samples,
            seed,
        )
    old, new = (rows["greedy_correct"].to_numpy(float) for rows in (before, after))
    return Measurements(
        against=against,
        gain=change(old, new),
        score=wilson_interval(new, evaluate.confidence),
        guards=guards,
        kl=last_kl(policy) if rules.max_kl is not None else None,
        length_ratio=ratio,
        contamination=share_trained_on(
            list(after["prompt"]),
            _training_prompts(datasets),
            rules.contamination.ngram,
            rules.contamination.overlap,
        ),
        approved_by=approved_by,
    )


def judged_sets(rows: pd.DataFrame, dataset: str, wanted: Sequence[str]) -> list[str]:
    """The evaluation sets that decide: the one named `dataset`, or with `all` every one.

    Raises DataError where that one is missing in the rows, or with `all` one of `wanted`.
    """
    names = set_names(rows) if dataset == ALL else [dataset]
    for name in (*names, *(wanted if dataset == ALL else ())):
        rows_of_set(rows, name)
    return names


def length_ratio(
    before: np.ndarray, after: np.ndarray, confidence: float, samples: int, seed: int
) -> Interval | None:
    """Mean of `after` over mean of `before`, `[N]` tokens each, with its bootstrap interval.

    Problems are resampled in pairs. None when a resample of `before` has no tokens at all.
    """
    picks = np.random.default_rng(seed)
    ratios = np.empty(samples)
    for i in range(samples):
        drawn = picks.integers(0, len(before), len(before))
        below = before[drawn].mean()
        if not below > 0:
            return None
        ratios[i] = after[drawn].mean() / below
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Interval(float(after.mean() / before.mean()), float(low), float(high))


def last_kl(policy: Path) -> float | None:
    """Mean KL of the last tenth of the steps that an RL model learned from (at least one).

    None where it is not known.
    """
    run = read_policy_steps(policy)
    if run is None or KL_COLUMN not in run.rows:
        return None
    steps = run.until_model
    last = steps[KL_COLUMN].to_numpy(float)[-max(1, math.ceil(LAST_STEPS * len(steps))) :]
    # Not nanmean: of a step without a number nothing is known.
    return float(last.mean()) if np.isfinite(last).all() else None


def _guarded(rows: pd.DataFrame, guard: GuardConfig) -> np.ndarray:
    """Return a guard's score of each of its problems, in the rows' order."""
    if guard.dataset:
        rows = rows[rows["dataset"] == guard.dataset]
    if guard.data_source:
        rows = rows[rows["data_source"] == guard.data_source]
    columns: Mapping[str, pd.Series] = {
        "pass_at_1": rows["greedy_correct"],
        "sampled": rows["samples_correct"] / rows["samples"],
        "majority": rows["majority_correct"],
        "format_rate": rows["format_rate"],
    }
    return columns[guard.metric].to_numpy(float)


def _training_prompts(datasets: Iterable[Path]) -> Iterable[str]:
    """Yield the prompts of all splits that were trained on; DataError where there are none."""
    found = False
    for folder in datasets:
        for split in TRAINING_SPLITS:
            path = folder / f"{split}.parquet"
            if path.is_file():
                found = True
                yield from map(prompt_text, pd.read_parquet(path, columns=["prompt"])["prompt"])
    if not found:
        raise DataError(
            f"no dataset that the model descends from has {' or '.join(TRAINING_SPLITS)}.parquet, "
            "so it is unknown whether it was trained on its test; give the run's dataset"
        )
