"""Numbers of an evaluation and their intervals: pass@k, majority vote, bootstrap, lengths.

Pure NumPy on plain arrays; N is the number of problems. Tables of completions are in `results`, the
comparison of two models is in `summary`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.errors import DataError

FloatArray = NDArray[np.float64]

_RESAMPLED_AT_ONCE = 1 << 20  # problem indices held in memory by the bootstrap: 8 MiB


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the ends of its confidence interval, e.g. Interval(0.31, 0.27, 0.35)."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Response lengths in tokens."""

    mean: float
    median: float
    p95: float
    max: float


def pass_at_k(samples: ArrayLike, correct: ArrayLike, k: int) -> FloatArray:
    """The chance that one of k samples is right, estimated without bias from n ≥ k samples.

    Chen et al. 2021 (arXiv:2107.03374), eq. 1: 1 − C(n−c, k) / C(n, k), as the product
    1 − ∏_{i=n−c+1}^{n} (1 − k/i), in which no factorial can overflow.

    samples: n, an integer or `[N]`; correct: c, `[N]` integers. Returns `[N]` float64.
    Raises DataError unless 1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    right = np.asarray(correct)
    total = np.broadcast_to(np.asarray(samples), right.shape)
    wrong = np.flatnonzero((right < 0) | (right > total))
    if wrong.size:
        row = wrong[0]
        raise DataError(
            f"problem {row} has {right[row]} right of {total[row]} samples; "
            "the count must lie between 0 and the number of samples"
        )
    if k < 1 or np.any(total < k):
        raise DataError(f"pass@{k} needs 1 ≤ k ≤ samples, but a problem has {total.min()}; lower k")
    result = np.empty(right.shape)
    for n in np.unique(total):
        here = total == n
        factors = 1.0 - k / np.arange(n, 0, -1)  # i = n, n−1, …, 1; exactly 0 at i = k
        all_wrong = np.concatenate(([1.0], np.cumprod(factors)))  # for c = 0 … n right samples
        result[here] = (1.0 - all_wrong)[right[here]]
    return result


def majority_vote(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer; None only when every sample failed to give one.

    Among equally frequent answers the one sampled first wins: samples are exchangeable, so this
    favours no answer, unlike an order of the strings.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    return votes.most_common(1)[0][0] if votes else None


def wilson_interval(correct: ArrayLike, confidence: float) -> Interval:
    """The interval of a rate from `[N]` outcomes of 0 or 1 (Wilson 1927), never empty.

    Raises DataError for other numbers.
    """
    outcomes = _checked(correct)
    if np.any((outcomes != 0) & (outcomes != 1)):
        raise DataError("a Wilson interval needs outcomes of 0 or 1; use mean_interval for others")
    n, rate = outcomes.size, float(outcomes.mean())
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # At a rate of 0 or 1 one end is the rate itself; rounding must not push it past.
    return Interval(rate, max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half)))


def mean_interval(values: ArrayLike, confidence: float, samples: int, seed: int) -> Interval:
    """The mean of `[N]` finite numbers with its percentile bootstrap interval (Efron 1979).

    `samples` resamples are drawn. Same seed, same interval.
    """
    checked = _checked(values)
    generator, n, means = np.random.default_rng(seed), checked.size, np.empty(samples)
    at_once = max(1, _RESAMPLED_AT_ONCE // n)
    for start in range(0, samples, at_once):
        stop = min(start + at_once, samples)
        picks = generator.integers(0, n, size=(stop - start, n))
        means[start:stop] = checked[picks].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(checked.mean()), float(low), float(high))


def rate_interval(values: ArrayLike, confidence: float, samples: int, seed: int) -> Interval:
    """The interval of a mean of N rates: Wilson where all are 0 or 1, else bootstrap.

    A bootstrap of values that are all 0 has no width and would claim certainty; Wilson's has. Nor
    has that of a single value, whose interval is all of [0, 1].
    """
    rates = _checked(values)
    if np.all((rates == 0) | (rates == 1)):
        return wilson_interval(rates, confidence)
    if rates.size == 1:
        return Interval(float(rates[0]), 0.0, 1.0)
    return mean_interval(rates, confidence, samples, seed)


def paired_bootstrap(
    before: ArrayLike, after: ArrayLike, confidence: float, samples: int, seed: int
) -> Interval:
    """The gain `after − before`, `[N]` scores of the same problems, with its bootstrap interval.

    Problems are resampled, not outcomes, so what both models share (a problem's difficulty)
    cancels (Koehn 2004). Raises DataError when shapes differ or N < 2: one problem has no spread to
    resample, and its interval would claim certainty.
    """
    first, second = _checked(before), _checked(after)
    if first.shape != second.shape:
        raise DataError(
            f"paired scores differ in number: {first.size} before, {second.size} after; "
            "score both models on the same problems"
        )
    if first.size < 2:
        raise DataError("one problem can't show a gain; evaluate on at least 2 problems")
    return mean_interval(second - first, confidence, samples, seed)


def length_summary(lengths: ArrayLike) -> LengthSummary:
    """Summarise response lengths (`[N]`, tokens, at least one)."""
    values = _checked(lengths)
    median, p95 = np.quantile(values, [0.5, 0.95])
    return LengthSummary(float(values.mean()), float(median), float(p95), float(values.max()))


def _checked(values: ArrayLike) -> FloatArray:
    """The values as `[N]` float64; DataError if empty or not finite."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise DataError("scores must be a non-empty list of numbers")
    if not np.isfinite(array).all():
        row = int(np.argmin(np.isfinite(array)))
        raise DataError(f"score of problem {row} is {array[row]}; every score must be finite")
    return array
