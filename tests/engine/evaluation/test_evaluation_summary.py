"""The comparison of two models against numbers counted by hand from the fixtures."""

import json

import pytest

from engine.errors import DataError
from engine.evaluation.metrics import wilson_interval
from engine.evaluation.summary import summarise


def compare(before, after, **changes):
    settings = {"k": 2, "confidence": 0.9, "bootstrap_samples": 500, "seed": 3}
    return summarise(before, after, **(settings | changes))


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
    assert read == first.to_dict()
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
