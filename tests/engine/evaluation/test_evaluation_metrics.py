"""pass@k, votes and intervals: published values, algebraic properties, coverage by simulation."""

from itertools import combinations
from math import isclose

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import DataError
from engine.evaluation import metrics
from engine.evaluation.metrics import (
    Interval,
    length_summary,
    majority_vote,
    mean_interval,
    paired_bootstrap,
    pass_at_k,
    rate_interval,
    wilson_interval,
)


@st.composite
def counts(draw):
    """Samples n and right samples c of some problems."""
    samples = draw(st.integers(1, 40))
    right = draw(st.lists(st.integers(0, samples), min_size=1, max_size=20))
    return samples, np.array(right)


outcome_pairs = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40)


# pass@k


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 2, 1 / 2),  # 1 − C(3,2)/C(4,2) = 1 − 3/6
        (5, 2, 3, 9 / 10),  # 1 − C(3,3)/C(5,3) = 1 − 1/10
        (10, 3, 5, 11 / 12),  # 1 − C(7,5)/C(10,5) = 1 − 21/252
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
    ],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, [c], k)[0] == pytest.approx(expected, abs=1e-15)


@given(n=st.integers(1, 7), data=st.data())
def test_pass_at_k_counts_the_subsets_that_hold_a_right_sample(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert isclose(pass_at_k(n, [c], k)[0], sum(map(any, subsets)) / len(subsets), abs_tol=1e-12)


@given(counts())
def test_pass_at_1_is_the_mean(case):
    samples, right = case
    np.testing.assert_allclose(pass_at_k(samples, right, 1), right / samples, atol=1e-12)


@given(counts())
def test_pass_at_k_is_a_probability_that_grows_with_k(case):
    samples, right = case
    curve = np.stack([pass_at_k(samples, right, k) for k in range(1, samples + 1)])
    assert (np.diff(curve, axis=0) >= -1e-12).all()
    assert ((curve >= 0) & (curve <= 1)).all()
    np.testing.assert_array_equal(curve[-1], right > 0)


@given(counts(), st.randoms())
def test_pass_at_k_follows_a_permutation_of_the_problems(case, random):
    samples, right = case
    order = list(range(right.size))
    random.shuffle(order)
    k = (samples + 1) // 2
    np.testing.assert_array_equal(
        pass_at_k(samples, right[order], k), pass_at_k(samples, right, k)[order]
    )


def test_pass_at_k_takes_a_number_of_samples_a_problem():
    result = pass_at_k([4, 5, 10], [1, 2, 3], 2)
    np.testing.assert_allclose(result, [1 / 2, 7 / 10, 24 / 45], atol=1e-15)


def test_pass_at_k_stays_finite_where_binomials_overflow():
    # C(100000, 1000) has thousands of digits; 1 − (1 − k/n)^c bounds the value from below.
    value = pass_at_k(100_000, [50], 1000)[0]
    assert 1 - (1 - 1000 / 100_000) ** 50 <= value < 0.4


@pytest.mark.parametrize(
    ("samples", "correct", "k", "message"),
    [
        (4, [1], 5, "lower k"),
        (4, [1], 0, "pass@0"),
        ([4, 2], [1, 1], 3, "a problem has 2"),
        (4, [1, 5], 2, "problem 1 has 5 right of 4"),
        (4, [-1], 2, "problem 0 has -1 right"),
    ],
)
def test_pass_at_k_refuses_impossible_counts(samples, correct, k, message):
    with pytest.raises(DataError, match=message):
        pass_at_k(samples, correct, k)


# majority vote


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        (["7", "8", "8"], "8"),
        (["9", "8", "8", "9"], "9"),  # a tie: the answer sampled first
        (["8", "9", "9", "8"], "8"),
        ([None, None, None, "3"], "3"),
        ([None, None], None),
        ([], None),
    ],
)
def test_majority_vote(answers, winner):
    assert majority_vote(answers) == winner


@given(st.lists(st.sampled_from(["1", "2", "3", None]), max_size=12), st.randoms())
def test_a_clear_majority_does_not_depend_on_order(answers, random):
    votes = {answer: answers.count(answer) for answer in answers if answer is not None}
    best = [answer for answer, count in votes.items() if count == max(votes.values())]
    shuffled = list(answers)
    random.shuffle(shuffled)
    winner = majority_vote(shuffled)
    assert winner in best if best else winner is None
    if len(best) == 1:
        assert winner == majority_vote(answers)


# intervals


def test_wilson_interval_of_a_textbook_case():
    # 15 of 50 at 95 %: 0.1910 to 0.4375 (Wilson score interval without continuity correction)
    interval = wilson_interval([1] * 15 + [0] * 35, 0.95)
    assert interval.mean == 0.3
    assert (interval.low, interval.high) == pytest.approx((0.19103, 0.43751), abs=1e-5)


@given(st.integers(1, 300), st.data(), st.sampled_from([0.6, 0.9, 0.95, 0.99]))
def test_wilson_interval_holds_the_rate_and_has_width(n, data, confidence):
    right = data.draw(st.integers(0, n))
    interval = wilson_interval([True] * right + [False] * (n - right), confidence)
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    assert interval.high - interval.low > 0


def test_wilson_interval_refuses_fractions():
    with pytest.raises(DataError, match="outcomes of 0 or 1"):
        wilson_interval([0.0, 0.5], 0.95)


@given(outcome_pairs, st.integers(0, 2**32))
def test_swapped_models_negate_the_gain(pairs, seed):
    before, after = np.array(pairs).T
    forth = paired_bootstrap(before, after, 0.9, 200, seed)
    back = paired_bootstrap(after, before, 0.9, 200, seed)
    assert back.mean == -forth.mean
    assert (back.low, back.high) == pytest.approx((-forth.high, -forth.low), abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.integers(0, 2**32))
def test_identical_models_gain_exactly_nothing(scores, seed):
    assert paired_bootstrap(scores, scores, 0.95, 100, seed) == Interval(0.0, 0.0, 0.0)


@given(outcome_pairs, st.integers(0, 2**32))
def test_gain_is_the_difference_of_means_inside_wider_and_wider_intervals(pairs, seed):
    before, after = np.array(pairs).T
    narrow = paired_bootstrap(before, after, 0.6, 300, seed)
    wide = paired_bootstrap(before, after, 0.99, 300, seed)
    assert narrow.mean == pytest.approx(after.mean() - before.mean(), abs=1e-12)
    assert -1 <= wide.low <= narrow.low <= narrow.high <= wide.high <= 1


def test_the_seed_alone_decides_the_interval():
    generator = np.random.default_rng(5)
    before, after = generator.random(200), generator.random(200)
    first = paired_bootstrap(before, after, 0.95, 500, seed=1)
    assert paired_bootstrap(before, after, 0.95, 500, seed=1) == first
    assert paired_bootstrap(before, after, 0.95, 500, seed=2) != first


def test_pairing_narrows_the_interval_of_correlated_scores():
    generator = np.random.default_rng(0)
    difficulty = generator.random(300)
    before, after = difficulty, difficulty + 0.05 + 0.01 * generator.standard_normal(300)
    paired = paired_bootstrap(before, after, 0.95, 1000, 0)
    unpaired = paired_bootstrap(before, generator.permutation(after), 0.95, 1000, 0)
    assert paired.high - paired.low < 0.1 * (unpaired.high - unpaired.low)


def test_bootstrap_agrees_with_the_normal_theory_it_approaches():
    values = np.random.default_rng(3).random(2000)
    interval = mean_interval(values, 0.95, 5000, 0)
    half = 1.96 * values.std() / np.sqrt(values.size)
    assert interval.low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.05 * half)


def test_rate_interval_has_width_where_a_bootstrap_has_none():
    assert mean_interval([0.0] * 20, 0.95, 100, 0) == Interval(0, 0, 0)
    assert rate_interval([0.0] * 20, 0.95, 100, 0) == wilson_interval([0] * 20, 0.95)
    mixed = [0.0, 0.5, 1.0, 0.25]
    assert rate_interval(mixed, 0.95, 100, 0) == mean_interval(mixed, 0.95, 100, 0)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    generator = np.random.default_rng(11)
    trials, problems = 300, 200
    paired_hits = wilson_hits = 0
    for trial in range(trials):
        easy = generator.random(problems) < 0.5
        before = generator.random(problems) < np.where(easy, 0.6, 0.2)  # 0.4 on average
        after = generator.random(problems) < np.where(easy, 0.8, 0.3)  # 0.55 on average
        gain = paired_bootstrap(before, after, 0.9, 400, seed=trial)
        paired_hits += gain.low <= 0.15 <= gain.high
        rate = wilson_interval(before, 0.9)
        wilson_hits += rate.low <= 0.4 <= rate.high
    # Binomial(300, 0.9) has a standard deviation of 1.7 %: three of them either way.
    assert 0.85 <= paired_hits / trials <= 0.95
    assert 0.85 <= wilson_hits / trials <= 0.95


def test_resampling_in_pieces_gives_what_one_piece_gives(monkeypatch):
    values = np.random.default_rng(1).random(50)
    whole = mean_interval(values, 0.95, 300, 9)
    monkeypatch.setattr(metrics, "_RESAMPLED_AT_ONCE", 70)  # one resample a piece
    assert mean_interval(values, 0.95, 300, 9) == whole


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([1, 0], [1, 0, 1], "2 before, 3 after"),
        ([1], [0], "at least 2 problems"),
        ([], [], "non-empty"),
        ([1, float("nan")], [1, 0], "problem 1 is nan"),
        ([1, 0], [float("inf"), 0], "problem 0 is inf"),
    ],
)
def test_paired_bootstrap_refuses_what_it_cannot_compare(before, after, message):
    with pytest.raises(DataError, match=message):
        paired_bootstrap(before, after, 0.95, 100, 0)


# lengths


def test_length_summary():
    summary = length_summary(range(101))
    assert (summary.mean, summary.median, summary.p95, summary.max) == (50, 50, 95, 100)
