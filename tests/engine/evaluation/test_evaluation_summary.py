"""The comparison of two models against numbers counted by hand from the fixtures."""

import json

import pandas as pd
import pytest

from engine.errors import DataError
from engine.evaluation.metrics import wilson_interval
from engine.evaluation.summary import Statistics, breakdown, summarise


def compare(before, after, **changes):
    settings = {"k": 2, "confidence": 0.9, "bootstrap_samples": 500, "seed": 3}
    return summarise(before, after, Statistics(**(settings | changes)))


def test_both_models_and_the_gain(before, after):
    c = compare(before, after)
    assert (c.before.model, c.after.model, c.problems, c.samples) == ("warm_start", "rl", 6, 4)
    assert c.before.pass_at_1 == wilson_interval([1, 0, 0, 1, 0, 0], 0.9)
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
        assert (gain.mean, gain.low, gain.high) == (0, 0, 0)
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
    with pytest.raises(DataError, match="at least 2 problems"):
        compare(before.head(1), after.head(1))


def test_a_hole_in_the_scores_is_refused(before, after):
    after["greedy_correct"] = [True, None, True, True, False, False]
    with pytest.raises(DataError, match="'greedy_correct' must hold booleans"):
        compare(before, after)


# Scores by source and level, against counts by hand.


def parts(before, after, k=2):
    return breakdown(before, after, Statistics(k, 0.95, 200, 0))


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
    assert found[-1].gain is None, "one problem shows no gain"
    assert found[0].line().endswith("5 problems, 4 not scored")
    with pytest.raises(DataError, match="asked 6 and 5 problems"):
        parts(before, after.head(5))


def test_cut_completions_count(before, after):
    after["greedy_truncated"] = pd.Series([True, False] * 3)
    assert parts(before, after)[0].after.truncated.mean == 0.5
