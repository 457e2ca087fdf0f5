"""Numbers of an evaluation and their intervals: pass@k, majority vote, means, gains, lengths.

Pure functions on plain arrays; N is the number of problems. All intervals that are shown or decided
by are made here. Tables of completions are in `results`, the comparison of two models in `summary`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.errors import DataError

FloatArray = NDArray[np.float64]


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


Kind = Literal["share", "number"]
"""What values are: from 0 to 1, or of any range."""


def mean_interval(values: ArrayLike, confidence: float, kind: Kind = "share") -> Interval:
    """The mean of `[N]` values with its interval, which has width and holds the mean at any N ≥ 1.

    - Outcomes of 0 or 1: Wilson's score interval (1927).
    - Other shares: that of Agresti and Coull (1998) with the shares' own variance and Student's t:
      as if half of z² more values were 0 and half were 1 (z: 1.96 at 95 %).
    - Numbers: Student's t, widened by what values one unit away may add that none of N has shown.

    A bootstrap of equal or one-sided values would claim certainty; these don't. Raises DataError
    for no values, what is not finite, and a share out of range.
    """
    checked = _checked(values)
    if kind == "number":
        mean, error = float(checked.mean()), np.sqrt(_square_errors(checked, confidence))
        return Interval(mean, mean - float(error), mean + float(error))
    if np.any((checked < 0) | (checked > 1)):
        raise DataError("shares must lie between 0 and 1; take kind='number' for other scores")
    if _are_outcomes(checked):
        return wilson_interval(float(checked.mean()), checked.size, confidence)
    interval = _padded(checked, (0.0, 1.0), confidence, weight=0.5)
    return Interval(interval.mean, max(0.0, interval.low), min(1.0, interval.high))


def paired_interval(
    before: ArrayLike, after: ArrayLike, confidence: float, kind: Kind = "share"
) -> Interval:
    """The gain `after − before`, `[N]` values of the same problems, with its interval at any N ≥ 1.

    What both models share (a problem's difficulty) cancels.

    - Outcomes of 0 or 1: method 10 of Newcombe (1998): Wilson's intervals of both, and their
      correlation with a correction for continuity.
    - Other shares: that of Bonett and Price (2012) with the differences' own variance and Student's
      t: as if z²/4 more problems were won by all of a share, and as many lost.
    - Numbers: that of `mean_interval`, of the differences.

    Raises DataError as `mean_interval` does, and where the shapes differ.
    """
    first, second = _checked(before), _checked(after)
    if first.shape != second.shape:
        raise DataError(
            f"paired scores differ in number: {first.size} before, {second.size} after; "
            "score both models on the same problems"
        )
    if kind == "number":
        return mean_interval(second - first, confidence, "number")
    if any(np.any((values < 0) | (values > 1)) for values in (first, second)):
        raise DataError("shares must lie between 0 and 1; take kind='number' for other scores")
    if _are_outcomes(first) and _are_outcomes(second):
        interval = _newcombe(first, second, confidence)
    else:
        interval = _padded(second - first, (-1.0, 1.0), confidence, weight=0.25)
    return Interval(interval.mean, max(-1.0, interval.low), min(1.0, interval.high))


def ratio_interval(before: ArrayLike, after: ArrayLike, confidence: float) -> Interval | None:
    """The mean of `after` over that of `before`, `[N]` paired numbers, by Fieller's theorem (1954).

    Widths are those of `mean_interval`'s numbers. None where the mean below may be 0, so that no
    interval bounds the ratio.
    """
    first, second = _checked(before), _checked(after)
    (below, both), (_, above) = _square_errors(np.stack([first, second]), confidence)
    x, y = float(first.mean()), float(second.mean())
    # The roots r of (y − r·x)² = above − 2·r·both + r²·below.
    a, b, c = x * x - float(below), x * y - float(both), y * y - float(above)
    if a <= 0 or x <= 0:
        return None
    half = math.sqrt(max(0.0, b * b - a * c))
    return Interval(y / x, (b - half) / a, (b + half) / a)


def wilson_interval(rate: float, n: int, confidence: float) -> Interval:
    """The interval of a rate of n outcomes of 0 or 1 (Wilson 1927)."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # At a rate of 0 or 1 one end is the rate itself; rounding must not push it past.
    return Interval(rate, max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half)))


def _newcombe(before: FloatArray, after: FloatArray, confidence: float) -> Interval:
    n = before.size
    old, new = (wilson_interval(float(v.mean()), n, confidence) for v in (before, after))
    shared = float((before * after).mean()) - old.mean * new.mean
    if shared > 0:
        shared = max(0.0, shared - 1 / (2 * n))
    spread = math.sqrt(old.mean * (1 - old.mean) * new.mean * (1 - new.mean))
    correlation = shared / spread if spread > 0 else 0.0

    def distance(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))

    gain = new.mean - old.mean
    below = distance(new.mean - new.low, old.high - old.mean)
    above = distance(new.high - new.mean, old.mean - old.low)
    return Interval(gain, gain - below, gain + above)


def _padded(
    values: FloatArray, ends: tuple[float, float], confidence: float, weight: float
) -> Interval:
    """The interval of a mean, as if `weight` · z² more values were at each of two ends."""
    mean, low, high = float(values.mean()), *ends
    weight *= NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    total = values.size + 2 * weight
    centre = (values.size * mean + weight * (low + high)) / total
    squares = float(np.square(values - centre).sum())
    squares += weight * ((low - centre) ** 2 + (high - centre) ** 2)
    half = _t_quantile(values.size, confidence) * math.sqrt(squares) / total
    return Interval(mean, min(mean, centre - half), max(mean, centre + half))


def _square_errors(values: FloatArray, confidence: float) -> FloatArray:
    """The squares of the intervals' half widths of means of numbers, and their products.

    values: `[N]`, or `[2, N]` for 2 × 2. A single value's spread is taken to be one unit.
    """
    n = values.shape[-1]
    spread = np.cov(values) if n > 1 else np.eye(len(values)) if values.ndim > 1 else np.ones(())
    unseen = wilson_interval(0.0, n, confidence).high ** 2
    squares = _t_quantile(n, confidence) ** 2 * spread / n
    return np.asarray(squares + unseen * (np.eye(2) if values.ndim > 1 else 1.0))


def _t_quantile(n: int, confidence: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(max(1, n - 1), (1 + confidence) / 2))


def _are_outcomes(values: FloatArray) -> bool:
    return bool(np.all((values == 0) | (values == 1)))


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
