"""Metrics of an evaluation, their summary and intervals."""

from __future__ import annotations

import json
import math
from itertools import combinations
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import DataError
from engine.evaluation import plots
from engine.evaluation.metrics import (
    length_summary,
    majority_vote,
    mean_interval,
    paired_interval,
    pass_at_k,
    ratio_interval,
    wilson_interval,
)
from engine.evaluation.policy_steps import read_overoptimisation
from engine.evaluation.summary import Statistics, breakdown, summarise


@st.composite
def counts(draw):
    """Samples n and right samples c of some problems."""
    samples = draw(st.integers(1, 40))
    right = draw(st.lists(st.integers(0, samples), min_size=1, max_size=20))
    return samples, np.array(right)


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


def outcomes(*counts: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs that are right in both models, in the first, in the second, and in none."""
    return np.repeat([1, 1, 0, 0], counts), np.repeat([1, 0, 1, 0], counts)


def test_wilson_interval_of_a_textbook_case():
    # 15 of 50 at 95 %: 0.1910 to 0.4375 (Wilson score interval without continuity correction)
    interval = mean_interval([1] * 15 + [0] * 35, 0.95)
    assert interval == wilson_interval(15, 50, 0.95)
    assert interval.mean == 0.3
    assert (interval.low, interval.high) == pytest.approx((0.19103, 0.43751), abs=1e-5)


def test_newcombe_interval_of_a_textbook_case():
    # Newcombe (1998), table II: a, b, c, d = 36, 12, 2, 0 is 0.0569 to 0.3404 by method 10.
    after, before = outcomes(36, 12, 2, 0)
    interval = paired_interval(before, after, 0.95)
    assert interval.mean == pytest.approx(0.2)
    assert (interval.low, interval.high) == pytest.approx((0.0569, 0.3404), abs=1e-4)


SCORES = {
    "outcomes": ("share", st.integers(0, 1)),
    "shares": ("share", st.sampled_from([0, 0.25, 0.5, 1])),
    "numbers": ("number", st.floats(-50, 50)),
}


@pytest.mark.parametrize("kind", SCORES)
@given(data=st.data(), n=st.integers(1, 60), confidence=st.sampled_from([0.6, 0.9, 0.95, 0.99]))
def test_every_interval_holds_its_mean_has_width_and_grows_with_confidence(
    kind, data, n, confidence
):
    name, values = SCORES[kind]
    before, after = (data.draw(st.lists(values, min_size=n, max_size=n)) for _ in range(2))
    whole = {"share": 1, "number": math.inf}[name]
    levels = (confidence, 0.995)
    for made, wider in (
        [mean_interval(after, level, name) for level in levels],
        [paired_interval(before, after, level, name) for level in levels],
    ):
        assert made.low <= made.mean <= made.high
        assert made.high - made.low > 1e-4
        assert -whole <= wider.low <= made.low
        assert made.high <= wider.high <= whole
    gain = paired_interval(before, after, confidence, name)
    back = paired_interval(after, before, confidence, name)
    assert gain.mean == pytest.approx(np.mean(after) - np.mean(before), abs=1e-9)
    ends = (gain.mean, gain.low, gain.high)
    assert (back.mean, back.high, back.low) == pytest.approx([-end for end in ends], abs=1e-9)


ONE_SIDED = {
    "5 of 5 right": ([1] * 5, 0.566, 1),
    "none of 20": ([0] * 20, 0, 0.161),
    "all shares a half": ([0.5] * 5, 0.19, 0.81),
    "one problem": ([0.5], 0, 1),
}


@pytest.mark.parametrize("case", ONE_SIDED)
def test_one_sided_rows_claim_no_certainty(case):
    values, low, high = ONE_SIDED[case]
    interval = mean_interval(values, 0.95)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.01)


def test_five_problems_that_all_became_right_are_no_certain_gain():
    interval = paired_interval([0] * 5, [1] * 5, 0.95)
    assert (interval.mean, interval.high) == (1, 1)
    assert interval.low == pytest.approx(0.386, abs=1e-3)
    alone = paired_interval([0], [1], 0.95)
    assert alone.low < 0 < alone.high


def test_identical_models_gain_nothing_with_width():
    for scores in ([1, 0] * 20, [0.25, 0.75] * 20):
        interval = paired_interval(scores, scores, 0.95)
        assert interval.mean == 0
        assert interval.low == pytest.approx(-interval.high)
        assert 0.001 < interval.high < 0.1


def test_pairing_narrows_the_interval_of_correlated_scores():
    generator = np.random.default_rng(0)
    difficulty = 100 * generator.random(300)
    before, after = difficulty, difficulty + 5 + generator.standard_normal(300)
    paired = paired_interval(before, after, 0.95, "number")
    unpaired = paired_interval(before, generator.permutation(after), 0.95, "number")
    assert paired.high - paired.low < 0.2 * (unpaired.high - unpaired.low)


def drawn(case: str, n: int, generator: np.random.Generator) -> tuple[Any, ...]:
    """Scores of two models on n problems, and the truth: of the second one's mean, of the gain."""
    ease = generator.beta(0.5, 0.5, n)  # most problems are easy or hard
    if case == "outcomes":
        before, after = generator.random(n) < 0.8 * ease, generator.random(n) < ease
        return before, after, 0.5, 0.1, "share"
    if case == "nearly all right":
        before, after = generator.random(n) < 0.95, generator.random(n) < 0.97
        return before, after, 0.97, 0.02, "share"
    if case == "shares of 4":
        before, after = generator.binomial(4, 0.8 * ease) / 4, generator.binomial(4, ease) / 4
        return before, after, 0.5, 0.1, "share"
    if case == "rare shares":  # which few problems mostly miss
        rare = np.where(generator.random(n) < 0.05, 1.0, 0.02)
        return np.full(n, 0.02), rare, 0.069, 0.049, "share"
    noise = generator.standard_normal((2, n))
    return 3 + noise[0], 5 + 2 * noise[1], 5.0, 2.0, "number"


CASES = ("outcomes", "nearly all right", "shares of 4", "rare shares", "numbers")


@pytest.mark.parametrize("n", [2, 5, 20, 100])
@pytest.mark.parametrize("case", CASES)
def test_intervals_cover_the_truth_as_often_as_they_say(case, n):
    generator, trials = np.random.default_rng(11), 600
    hits = np.zeros(2)
    for _ in range(trials):
        before, after, mean, gain, kind = drawn(case, n, generator)
        made = (mean_interval(after, 0.95, kind), paired_interval(before, after, 0.95, kind))
        hits += [i.low <= truth <= i.high for i, truth in zip(made, (mean, gain), strict=True)]
    # Binomial(600, 0.95) has a standard deviation of 0.9 %. Near a rate of 1 Wilson's own coverage
    # falls to 0.86 at few problems, by upper ends that are too low, on which nothing is decided.
    assert (hits / trials >= [0.84, 0.9]).all(), hits / trials
    if case in ("outcomes", "shares of 4", "numbers"):
        assert (hits / trials >= 0.925).all(), hits / trials
        assert n < 100 or (hits / trials <= 0.985).all(), "as narrow as it may be"


def test_ratio_of_means_covers_the_truth():
    generator, trials, hits = np.random.default_rng(5), 400, 0
    for _ in range(trials):
        before = generator.gamma(4, 10, 30)
        after = 1.5 * before + generator.normal(0, 10, 30)
        found = ratio_interval(before, after, 0.95)
        assert found is not None
        assert found.low < found.mean < found.high
        hits += found.low <= 1.5 <= found.high
    assert 0.92 <= hits / trials <= 0.985


def test_a_ratio_over_what_may_be_nothing_has_no_interval():
    assert ratio_interval([0, 0, 0, 1], [1, 2, 3, 4], 0.95) is None
    constant = ratio_interval([4] * 40, [9] * 40, 0.95)
    assert constant is not None
    assert constant.mean == 2.25
    assert 2.1 < constant.low < 2.25 < constant.high < 2.4


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([1, 0], [1, 0, 1], "2 before, 3 after"),
        ([], [], "non-empty"),
        ([1, float("nan")], [1, 0], "problem 1 is nan"),
        ([1, 0], [float("inf"), 0], "problem 0 is inf"),
        ([1, 0], [1, 2], "shares must lie between 0 and 1"),
    ],
)
def test_paired_interval_refuses_what_it_cannot_compare(before, after, message):
    with pytest.raises(DataError, match=message):
        paired_interval(before, after, 0.95)


def test_length_summary():
    summary = length_summary(range(101))
    assert (summary.mean, summary.median, summary.p95, summary.max) == (50, 50, 95, 100)


def compare(before, after, **changes):
    settings = {"k": 2, "confidence": 0.9, "seed": 3}
    return summarise(before, after, Statistics(**(settings | changes)))


def test_both_models_and_the_gain(before, after):
    c = compare(before, after)
    assert (c.before.model, c.after.model, c.problems, c.samples) == ("warm_start", "rl", 6, 4)
    assert c.before.pass_at_1 == wilson_interval(2, 6, 0.9)
    assert c.after.pass_at_1.mean == pytest.approx(4 / 6)
    assert (c.fixed, c.broken) == (3, 1)
    assert c.gain.mean == pytest.approx(2 / 6)
    assert c.gain.low < c.gain.mean < c.gain.high
    # Right samples of 4 before: 2, 1, 0, 4, 2, 1; pass@2 is 5/6, 1/2, 0, 1, 5/6, 1/2.
    assert c.before.pass_at_k.mean == pytest.approx((5 / 6 + 1 / 2 + 1 + 5 / 6 + 1 / 2) / 6)
    assert c.after.pass_at_k.mean == pytest.approx(5 / 6)  # 4, 3, 4, 4, 4, 0 right
    assert c.pass_at_k_gain.mean == pytest.approx(c.after.pass_at_k.mean - c.before.pass_at_k.mean)
    # Votes before: 3 (first of a tie), 0, none, 92, 65, 35.
    assert c.before.majority.mean == pytest.approx(4 / 6)
    assert c.majority_gain.mean == pytest.approx(1 / 6)
    assert c.before.format_rate.mean == pytest.approx((1 + 0.75 + 0 + 1 + 1 + 0.25) / 6)
    assert (c.before.response_length.mean, c.before.greedy_length.max) == (7.0, 10.0)


def test_pass_at_k_uses_k(before, after):
    assert compare(before, after, k=4).before.pass_at_k.mean == pytest.approx(5 / 6)
    assert compare(before, after, k=1).before.pass_at_k.mean == pytest.approx(10 / 24)


def test_a_model_against_itself_gains_nothing(after):
    c = compare(after, after)
    for gain in (c.gain, c.pass_at_k_gain, c.majority_gain):
        assert gain.mean == 0
        assert gain.low == pytest.approx(-gain.high)
    assert (c.fixed, c.broken) == (0, 0)


def test_the_seed_decides_and_json_keeps_every_number(before, after):
    first, second = compare(before, after), compare(before, after)
    assert first.to_json() == second.to_json()
    read = json.loads(first.to_json())
    assert [read["gain"][key] for key in ("mean", "low", "high")] == [
        first.gain.mean,
        first.gain.low,
        first.gain.high,
    ]
    assert (read["seed"], read["k"], read["confidence"]) == (3, 2, 0.9)
    assert len(read["prompt_digest"]) == 64


def test_unpaired_or_short_rows_are_refused(make_rows, before, after):
    with pytest.raises(DataError, match="asked 6 and 4 problems"):
        compare(before, after.head(4))
    with pytest.raises(DataError, match="pass@5"):
        compare(before, after, k=5)
    fewer = make_rows("rl", ["3"] * 6, [["3", "3"]] * 6)
    with pytest.raises(DataError, match="different numbers of samples"):
        compare(before, fewer)


def test_a_hole_in_the_scores_is_refused(before, after):
    after["greedy_correct"] = [True, None, True, True, False, False]
    with pytest.raises(DataError, match="'greedy_correct' must hold booleans"):
        compare(before, after)


def parts(before, after, k=2):
    return breakdown(before, after, Statistics(k, 0.95, 0))


def means(part, metric):
    return tuple(getattr(model, metric).mean for model in (part.before, part.after))


def test_each_source_and_each_of_its_levels(before, after):
    whole, easy, hard = parts(before, after)
    assert [(p.source, p.level, p.problems) for p in (whole, easy, hard)] == [
        ("arithmetic", "", 6), ("arithmetic", "easy", 3), ("arithmetic", "hard", 3),
    ]  # fmt: skip
    assert means(whole, "pass_at_1") == pytest.approx((2 / 6, 4 / 6))
    assert whole.gain.mean == pytest.approx(2 / 6)
    assert means(easy, "pass_at_1") == pytest.approx((1 / 3, 1))
    assert means(hard, "pass_at_1") == pytest.approx((1 / 3, 1 / 3))
    assert easy.before.mean_at_k.mean == pytest.approx((2 / 4 + 1 / 4 + 0) / 3)
    assert easy.before.pass_at_k.mean == pytest.approx((1 - 1 / 6 + 1 / 2 + 0) / 3)
    assert hard.after.majority.mean == pytest.approx(2 / 3)
    rate = easy.before.mean_at_k
    assert 0 <= rate.low < rate.mean < rate.high <= 1
    assert easy.before.greedy_length.mean == pytest.approx(6)
    assert easy.line().startswith("arithmetic, easy: pass@1 33.3% → 100.0% (+66.7 [")


def test_sources_stand_apart_and_what_was_not_scored_is_told(before, after):
    for table in (before, after):
        table.loc[5, "data_source"] = "other"
        table.loc[0, "errors"] = 2
    found = parts(before, after)
    assert [p.source for p in found if not p.level] == ["arithmetic", "other"]
    assert found[-1].gain.low < 0 < found[-1].gain.high, "one problem shows no gain"
    assert found[0].line().endswith("5 problems, 4 not scored")
    with pytest.raises(DataError, match="asked 6 and 5 problems"):
        parts(before, after.head(5))


def test_cut_completions_count(before, after):
    after["greedy_truncated"] = pd.Series([True, False] * 3)
    assert parts(before, after)[0].after.truncated.mean == 0.5


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
