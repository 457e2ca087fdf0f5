"""The promotion rule, above all that it promotes nothing on numbers it can't read."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.evaluation.gate import decide, read_interval
from engine.evaluation.metrics import Interval

GOOD = Interval(0.3, 0.2, 0.4)


def test_first_model_is_promoted():
    decision = decide(Interval(-0.1, -0.2, 0.0), 0.0, has_champion=False)
    assert decision.promote
    assert "no champion yet" in decision.reason
    assert "-10.00 [-20.00, +0.00]" in decision.reason


def test_a_sure_gain_is_promoted():
    decision = decide(GOOD, 0.1, has_champion=True)
    assert decision.promote
    assert "+30.00 [+20.00, +40.00]" in decision.reason
    assert "+10.00" in decision.reason


@pytest.mark.parametrize(
    ("gain", "minimum"),
    [
        (GOOD, 0.2),  # at the bound is not above it
        (GOOD, 0.25),
        (Interval(0.0, 0.0, 0.0), 0.0),  # the same model again
        (Interval(0.02, -0.01, 0.05), 0.0),
    ],
)
def test_an_unsure_gain_is_not_promoted(gain, minimum):
    decision = decide(gain, minimum, has_champion=True)
    assert not decision.promote
    assert f"{100 * gain.low:+.2f}" in decision.reason
    assert f"{100 * minimum:+.2f}" in decision.reason


@pytest.mark.parametrize("has_champion", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "0.5", True])
@pytest.mark.parametrize("field", ["mean", "low", "high", "minimum_gain"])
def test_unreadable_numbers_promote_nothing(field, bad, has_champion):
    numbers = {"mean": 0.3, "low": 0.2, "high": 0.4, "minimum_gain": 0.0, field: bad}
    minimum = numbers.pop("minimum_gain")
    decision = decide(Interval(**numbers), minimum, has_champion)
    assert not decision.promote
    assert field in decision.reason
    assert repr(bad) in decision.reason


@pytest.mark.parametrize("has_champion", [True, False])
@pytest.mark.parametrize(
    "gain", [None, Interval(0.3, 0.4, 0.2), Interval(30, 20, 40), Interval(3, 0.2, 0.4)]
)
def test_missing_or_impossible_gains_promote_nothing(gain, has_champion):
    assert not decide(gain, 0.0, has_champion).promote


def test_an_unknown_champion_does_not_read_as_none():
    assert not decide(Interval(0.0, -0.1, 0.1), 0.0, has_champion=None).promote


anything = st.one_of(st.floats(), st.none(), st.text(max_size=3), st.booleans())


@given(anything, anything, anything, anything, st.sampled_from([True, False, None]))
def test_promotion_always_rests_on_finite_numbers(mean, low, high, minimum, has_champion):
    decision = decide(Interval(mean, low, high), minimum, has_champion)
    assert decision.reason.endswith(".")
    if decision.promote:
        assert all(math.isfinite(number) for number in (mean, low, high, minimum))
        assert has_champion is False or low > minimum


def test_read_interval_takes_back_what_a_manifest_holds():
    assert read_interval({"mean": 0.3, "low": 0.2, "high": 0.4, "more": "x"}) == GOOD


@pytest.mark.parametrize(
    "value",
    [
        None,
        0.3,
        [0.3, 0.2, 0.4],
        {},
        {"mean": 0.3, "low": 0.2},
        {"mean": 0.3, "low": None, "high": 0.4},
        {"mean": 0.3, "low": "0.2", "high": 0.4},
        {"mean": 0.3, "low": True, "high": 0.4},
    ],
)
def test_read_interval_gives_none_for_anything_else(value):
    assert read_interval(value) is None
