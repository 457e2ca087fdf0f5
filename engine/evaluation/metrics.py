"""Numbers of an evaluation and their intervals: pass@k, majority vote, means, gains, lengths.

Pure functions on plain arrays; N is the number of problems, z the standard normal's quantile of
(1 + confidence) / 2, 1.96 at 95 %.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
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

    def __iter__(self) -> Iterator[float]:
        return iter((self.mean, self.low, self.high))


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
    """The most frequent answer, of equally frequent ones the first; None without any."""
    votes = Counter(answer for answer in answers if answer is not None)
    return votes.most_common(1)[0][0] if votes else None


Kind = Literal["share", "number"]
"""The range of values: from 0 to 1, or any."""


def mean_interval(values: ArrayLike, confidence: float, kind: Kind = "share") -> Interval:
    """The mean of `[N]` values with its interval, which has width and holds the mean at any N ≥ 1.

    - Outcomes of 0 or 1: `wilson_interval`.
    - Other shares: c ± t·s / √(N + z²), where c and s² are mean and variance of the shares with
      z²/2 zeros and z²/2 ones added, and t is Student's with N − 1 degrees of freedom. It is the
      interval of Agresti and Coull (Am. Stat. 52:119, 1998) with the shares' own variance.
    - Numbers: mean ± √(t²·s²/N + w²), where w is Wilson's upper end for 0 of N: what values one
      unit away may add that none of N has shown.

    Equal or one-sided values claim no certainty. Raises DataError for no values, what is not
    finite, and a share out of range.
    """
    checked = _checked(values, kind)
    if kind == "number":
        mean, error = float(checked.mean()), np.sqrt(_square_errors(checked, confidence))
        return Interval(mean, mean - float(error), mean + float(error))
    if _are_outcomes(checked):
        return wilson_interval(int(checked.sum()), checked.size, confidence)
    interval = _padded(checked, (0.0, 1.0), confidence, weight=0.5)
    return Interval(interval.mean, max(0.0, interval.low), min(1.0, interval.high))


def paired_interval(
    before: ArrayLike, after: ArrayLike, confidence: float, kind: Kind = "share"
) -> Interval:
    """The gain `after − before`, `[N]` values of the same problems, with its interval at any N ≥ 1.

    What both models share (a problem's difficulty) cancels.

    - Outcomes of 0 or 1: method 10 of Newcombe (Stat. Med. 17:2635, 1998). With Wilson's [l1, u1]
      of p1 before and [l2, u2] of p2 after, and the correlation φ of the outcomes, corrected for
      continuity, the ends are p2 − p1 − √((p2−l2)² − 2φ(p2−l2)(u1−p1) + (u1−p1)²) and
      p2 − p1 + √((u2−p2)² − 2φ(u2−p2)(p1−l1) + (p1−l1)²).
    - Other shares: the interval of `mean_interval` of the differences, with z²/4 each of −1 and 1
      added: that of Bonett and Price (J. Educ. Behav. Stat. 37:479, 2012) with their own variance.
    - Numbers: that of `mean_interval`, of the differences.

    Raises DataError as `mean_interval` does, and where the shapes differ.
    """
    first, second = _checked(before, kind), _checked(after, kind)
    if first.shape != second.shape:
        raise DataError(
            f"paired scores differ in number: {first.size} before, {second.size} after; "
            "score both models on the same problems"
        )
    if kind == "number":
        return mean_interval(second - first, confidence, "number")
    if _are_outcomes(first) and _are_outcomes(second):
        interval = _newcombe(first, second, confidence)
    else:
        interval = _padded(second - first, (-1.0, 1.0), confidence, weight=0.25)
    return Interval(interval.mean, max(-1.0, interval.low), min(1.0, interval.high))


def ratio_interval(before: ArrayLike, after: ArrayLike, confidence: float) -> Interval | None:
    """The mean of `after` over that of `before`, `[N]` paired numbers.

    Fieller's theorem (J. R. Stat. Soc. B 16:175, 1954): the ends are the roots r of
    (y − r·x)² = v_yy − 2r·v_xy + r²·v_xx, with the means x before and y after, and v the squared
    half widths of `mean_interval`'s numbers. None where x may be 0: nothing bounds the ratio then.
    """
    first, second = _checked(before), _checked(after)
    (below, both), (_, above) = _square_errors(np.stack([first, second]), confidence)
    x, y = float(first.mean()), float(second.mean())
    a, b, c = x * x - float(below), x * y - float(both), y * y - float(above)
    if a <= 0 or x <= 0:
        return None
    half = math.sqrt(max(0.0, b * b - a * c))
    return Interval(y / x, (b - half) / a, (b + half) / a)


@functools.lru_cache(maxsize=4096)
def wilson_interval(right: int, n: int, confidence: float) -> Interval:
    """The interval of the rate p of `right` among n outcomes of 0 or 1.

    (p + z²/2n ± z·√(p(1 − p)/n + z²/4n²)) / (1 + z²/n): Wilson (J. Am. Stat. Assoc. 22:209, 1927).
    """
    from scipy.stats import binomtest  # takes a second

    ends = binomtest(right, n).proportion_ci(confidence, "wilson")
    return Interval(right / n, float(ends.low), float(ends.high))


def _newcombe(before: FloatArray, after: FloatArray, confidence: float) -> Interval:
    n = before.size
    old, new = (wilson_interval(int(v.sum()), n, confidence) for v in (before, after))
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
    """Squared half widths of the means of `[N]` values; of `[2, N]`, with products, `[2, 2]`."""
    # A single value's spread is taken to be one unit.
    n = values.shape[-1]
    spread = np.cov(values) if n > 1 else np.eye(len(values)) if values.ndim > 1 else np.ones(())
    unseen = wilson_interval(0, n, confidence).high ** 2
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


def _checked(values: ArrayLike, kind: Kind = "number") -> FloatArray:
    """The values as `[N]` float64; DataError if empty, not finite, or shares out of range."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise DataError("scores must be a non-empty list of numbers")
    if not np.isfinite(array).all():
        row = int(np.argmin(np.isfinite(array)))
        raise DataError(f"score of problem {row} is {array[row]}; every score must be finite")
    if kind == "share" and np.any((array < 0) | (array > 1)):
        raise DataError("shares must lie between 0 and 1; take kind='number' for other scores")
    return array
