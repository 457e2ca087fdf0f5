"""Two tables of evaluation rows in, their comparison out: each model's metrics and the gain.

Numbers only: whether a gain suffices is decided in `engine.promotion`, how it looks in `report`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np
import pandas as pd
from pydantic import TypeAdapter, ValidationError

from engine.errors import DataError
from engine.evaluation.episodes import EpisodeMeasure, compare_episodes
from engine.evaluation.metrics import (
    Interval,
    LengthSummary,
    length_summary,
    paired_bootstrap,
    pass_at_k,
    rate_interval,
    wilson_interval,
)
from engine.evaluation.rows import check_paired


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model's metrics; rates are fractions of the problems."""

    model: str  # "warm_start", "rl" or "champion"
    pass_at_1: Interval  # greedy decoding, Wilson interval
    mean_at_k: Interval  # samples that are right; Wilson if all are 0 or 1, else bootstrap
    pass_at_k: Interval  # unbiased estimate from the samples; interval as above
    majority: Interval  # majority vote over the samples, Wilson interval
    format_rate: Interval  # samples that keep the answer format; interval as above
    truncated: Interval  # greedy completions at the limit of tokens, Wilson interval
    response_length: LengthSummary  # a problem's mean tokens over its samples
    greedy_length: LengthSummary  # tokens of greedy completions
    greedy_score: float  # mean score of greedy completions
    errors: int  # completions that could not be scored, and count as wrong


@dataclass(frozen=True, slots=True)
class EvaluationComparison:
    """Two models on the same problems. Gains are `after − before` with paired intervals."""

    before: ModelSummary
    after: ModelSummary
    gain: Interval  # greedy pass@1: what promotion decides on
    mean_at_k_gain: Interval
    pass_at_k_gain: Interval
    majority_gain: Interval
    fixed: int  # problems wrong before and right after (greedy)
    broken: int  # problems right before and wrong after (greedy)
    problems: int  # N
    prompt_digest: str  # SHA-256 of what both were asked
    k: int  # of pass@k
    samples: int  # fewest sampled completions of a problem
    confidence: float  # of every interval, e.g. 0.95
    bootstrap_samples: int
    seed: int
    # Turns, returns and calls, where completions are episodes.
    episodes: list[EpisodeMeasure] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Return plain dicts, strings and numbers, as `json.dumps` takes them."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> EvaluationComparison:
        """Return the comparison that `to_dict` gave; DataError where something is missing in it."""
        try:
            return TypeAdapter(EvaluationComparison).validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise DataError(
                f"{field} of a comparison: {first['msg']}; evaluate the models again"
            ) from None

    def to_json(self) -> str:
        """Return strict JSON (no NaN), the same text for the same comparison."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, allow_nan=False)


def summarise(
    rows_before: pd.DataFrame,
    rows_after: pd.DataFrame,
    k: int,
    confidence: float,
    bootstrap_samples: int,
    seed: int,
) -> EvaluationComparison:
    """Compare two models' rows (see `rows.COLUMNS`) problem by problem.

    Raises DataError when the rows are not of the same problems in the same order, when a problem
    has fewer than k samples, or when there are fewer than 2 problems.
    """
    digest = check_paired(rows_before, rows_after)
    if (rows_before["samples"].to_numpy() != rows_after["samples"].to_numpy()).any():
        raise DataError(
            "the models have different numbers of samples a problem, so pass@k and majority "
            "votes can't be compared; evaluate both with the same evaluate.samples"
        )

    def gain(before: np.ndarray, after: np.ndarray) -> Interval:
        return paired_bootstrap(before, after, confidence, bootstrap_samples, seed)

    greedy_before, greedy_after = (_flags(r, "greedy_correct") for r in (rows_before, rows_after))
    return EvaluationComparison(
        before=model_summary(rows_before, k, confidence, bootstrap_samples, seed),
        after=model_summary(rows_after, k, confidence, bootstrap_samples, seed),
        gain=gain(greedy_before, greedy_after),
        mean_at_k_gain=gain(_mean_at_k(rows_before), _mean_at_k(rows_after)),
        pass_at_k_gain=gain(_pass_at_k(rows_before, k), _pass_at_k(rows_after, k)),
        majority_gain=gain(
            _flags(rows_before, "majority_correct"), _flags(rows_after, "majority_correct")
        ),
        fixed=int(np.sum(~greedy_before & greedy_after)),
        broken=int(np.sum(greedy_before & ~greedy_after)),
        problems=len(rows_before),
        prompt_digest=digest,
        k=k,
        samples=int(rows_before["samples"].min()),
        confidence=confidence,
        bootstrap_samples=bootstrap_samples,
        seed=seed,
        episodes=compare_episodes(rows_before, rows_after, confidence, bootstrap_samples, seed),
    )


def model_summary(
    rows: pd.DataFrame, k: int, confidence: float, bootstrap_samples: int, seed: int
) -> ModelSummary:
    """One model's metrics on the problems of `rows`, at least one."""
    return ModelSummary(
        model=str(rows["model"].iloc[0]),
        pass_at_1=wilson_interval(_flags(rows, "greedy_correct"), confidence),
        mean_at_k=rate_interval(_mean_at_k(rows), confidence, bootstrap_samples, seed),
        pass_at_k=rate_interval(_pass_at_k(rows, k), confidence, bootstrap_samples, seed),
        majority=wilson_interval(_flags(rows, "majority_correct"), confidence),
        format_rate=rate_interval(
            rows["format_rate"].to_numpy(), confidence, bootstrap_samples, seed
        ),
        truncated=wilson_interval(_flags(rows, "greedy_truncated"), confidence),
        response_length=length_summary(rows["response_length"].to_numpy()),
        greedy_length=length_summary(rows["greedy_length"].to_numpy()),
        greedy_score=float(rows["greedy_score"].mean()),
        errors=int(rows["errors"].sum()),
    )


def _mean_at_k(rows: pd.DataFrame) -> np.ndarray:
    return (rows["samples_correct"] / rows["samples"]).to_numpy(float)


def _pass_at_k(rows: pd.DataFrame, k: int) -> np.ndarray:
    return pass_at_k(rows["samples"].to_numpy(), rows["samples_correct"].to_numpy(), k)


def _flags(rows: pd.DataFrame, column: str) -> np.ndarray:
    """Return a column of booleans `[N]`; raise DataError for a hole in it."""
    if rows[column].dtype != bool:
        raise DataError(
            f"evaluation column {column!r} must hold booleans, got {rows[column].dtype}; "
            "evaluate again"
        )
    return rows[column].to_numpy()
