"""The rules, above all that nothing is promoted on evidence that is missing or no number."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ContaminationConfig, GuardConfig, PromoteConfig
from engine.evaluation.metrics import Interval
from engine.promotion.gate import trained_on
from engine.promotion.rules import Decision, Measurements, decide_on_sets, with_reward_audit


def decide(measurements: Measurements, rules: PromoteConfig) -> Decision:
    return decide_on_sets({"test": measurements}, rules)


GUARD = GuardConfig(data_source="gsm8k", tolerance=0.02)
RULES = PromoteConfig(
    minimum_problems=500,
    minimum_gain=0.1,
    minimum_score=0.3,
    guards=(GUARD,),
    max_kl=0.5,
    max_length_ratio=1.5,
    contamination=ContaminationConfig(max_share=0.1),
    approval="required",
)
GOOD = Measurements(
    against="champion",
    problems=500,
    gain=Interval(0.3, 0.2, 0.4),
    score=Interval(0.5, 0.4, 0.6),
    guards={GUARD.name: Interval(0.0, -0.01, 0.01)},
    kl=0.2,
    length_ratio=Interval(1.1, 1.0, 1.2),
    contamination=0.05,
    approved_by="ada",
)
BAD: dict[str, dict[str, Any]] = {
    "problems": {"problems": 499},
    "gain": {"gain": Interval(0.15, 0.1, 0.2)},  # at the bound is not above it
    "score": {"score": Interval(0.4, 0.29, 0.5)},
    f"guard {GUARD.name}": {"guards": {GUARD.name: Interval(0.0, -0.03, 0.03)}},
    "kl": {"kl": 0.51},
    "length": {"length_ratio": Interval(1.4, 1.3, 1.6)},
    "contamination": {"contamination": 0.2},
    "approval": {"approved_by": " "},
}
SCORER = {"scorer": "answer_match", "passed": True, "holes": [], "warnings": []}
FIELDS = ("problems", "gain", "score", "kl", "length_ratio", "contamination")
UNIT = st.floats(0, 1)


def test_all_rules_pass_and_say_so() -> None:
    decision = decide(GOOD, RULES)
    assert decision.promote
    assert [outcome.rule for outcome in decision.outcomes] == list(BAD)
    assert "+30.00 percentage points [+20.00, +40.00]" in decision.reason
    assert "approved by ada" in decision.reason
    json.dumps(decision.to_dict(), allow_nan=False)
    json.dumps(asdict(GOOD), allow_nan=False)


@pytest.mark.parametrize("rule", BAD)
def test_each_rule_alone_stops_a_promotion(rule: str) -> None:
    decision = decide(replace(GOOD, **BAD[rule]), RULES)
    assert not decision.promote
    assert [outcome.rule for outcome in decision.outcomes if not outcome.passed] == [rule]
    assert decision.reason.startswith("Not promoted: ")
    assert decision.waits_for_approval is (rule == "approval")


def test_values_at_their_bounds_pass() -> None:
    at = replace(
        GOOD,
        score=Interval(0.4, 0.3, 0.5),
        guards={GUARD.name: Interval(0.0, -0.02, 0.0)},
        kl=0.5,
        length_ratio=Interval(1.4, 1.3, 1.5),
        contamination=0.1,
    )
    assert decide(at, RULES).promote


@pytest.mark.parametrize("field", [*FIELDS, "guards"])
def test_missing_evidence_promotes_nothing(field: str) -> None:
    lacking = replace(GOOD, **{field: {} if field == "guards" else None})
    decision = decide(lacking, RULES)
    assert not decision.promote
    assert "was not measured" in decision.reason


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, True, "0.1"])
@pytest.mark.parametrize("field", FIELDS)
def test_what_is_no_number_promotes_nothing(field: str, number: Any) -> None:
    value = number if field in ("problems", "kl", "contamination") else Interval(number, 0.2, 0.3)
    decision = decide(replace(GOOD, **{field: value}), RULES)
    assert not decision.promote
    assert "can't be" in decision.reason


def test_a_first_champion_needs_a_gain_over_the_warm_start() -> None:
    first = replace(GOOD, against="warm_start", gain=Interval(0.1, 0.01, 0.2), contamination=0.0)
    assert decide(first, PromoteConfig()).promote
    nothing = replace(first, gain=Interval(0.0, 0.0, 0.0))
    decision = decide(nothing, PromoteConfig())
    assert not decision.promote
    assert "+0.00 percentage points [+0.00, +0.00] over the warm start; its" in decision.reason
    assert not decide(first, PromoteConfig(minimum_gain=0.05)).promote


def test_bootstrap_lets_a_first_champion_in_by_the_other_rules_alone() -> None:
    rules = RULES.model_copy(update={"bootstrap": True})
    worse = replace(GOOD, against="warm_start", gain=Interval(-0.1, -0.2, 0.0))
    assert "promote.bootstrap asks nothing for the first champion" in decide(worse, rules).reason
    assert decide(worse, rules).promote
    assert not decide(replace(worse, kl=0.6), rules).promote
    assert not decide(replace(worse, score=Interval(0.4, 0.2, 0.5)), rules).promote
    assert not decide(replace(worse, gain=None), rules).promote
    assert not decide(replace(worse, against="champion"), rules).promote


def test_rules_that_are_not_set_ask_for_nothing() -> None:
    decision = decide(replace(GOOD, kl=None, length_ratio=None, guards={}), PromoteConfig())
    rules = [outcome.rule for outcome in decision.outcomes]
    assert rules == ["problems", "gain", "contamination"]


@given(low=st.floats(-1, 1), width=UNIT, kl=UNIT, ratio=st.floats(0, 3), share=UNIT, drop=UNIT)
def test_promoted_exactly_when_every_bound_holds(
    low: float, width: float, kl: float, ratio: float, share: float, drop: float
) -> None:
    high = min(1.0, low + width)
    evidence = replace(
        GOOD,
        gain=Interval((low + high) / 2, low, high),
        guards={GUARD.name: Interval(0.0, -drop, 0.0)},
        kl=kl,
        length_ratio=Interval(ratio, ratio, ratio),
        contamination=share,
    )
    holds = low > 0.1 and drop <= 0.02 and kl <= 0.5 and ratio <= 1.5 and share <= 0.1
    assert decide(evidence, RULES).promote is holds


@given(low=st.floats(-1, 0.9), more=st.floats(0, 0.1))
def test_a_larger_gain_is_never_worse(low: float, more: float) -> None:
    def promoted(end: float) -> bool:
        return decide(replace(GOOD, gain=Interval(end, end, 1.0)), RULES).promote

    assert promoted(low) <= promoted(low + more)


def test_every_set_must_pass_and_the_rules_on_the_run_are_said_once() -> None:
    worse = replace(GOOD, score=Interval(0.2, 0.1, 0.3))
    assert decide_on_sets({"test": GOOD}, RULES) == decide(GOOD, RULES)
    both = decide_on_sets({"test": GOOD, "aime": worse}, RULES)
    assert [o.rule for o in both.outcomes if not o.passed] == ["score on aime"]
    assert "aime: pass@1 is 20.00%" in both.reason
    rules = [o.rule for o in both.outcomes]
    assert [rules.count(rule) for rule in ("kl", f"guard {GUARD.name}", "approval")] == [1, 1, 1]
    assert {"gain on test", "gain on aime", "length on aime"} <= {*rules}
    unapproved = replace(GOOD, approved_by="")
    waits = decide_on_sets({"test": unapproved, "aime": unapproved}, RULES)
    assert waits.waits_for_approval
    assert not decide_on_sets({}, RULES).promote


# Test prompts in the training data: verbatim, rewritten, and only alike.

LONG = "Tom has three apples and he gives two of them to his friend Ann on Monday at noon"
TEXTS = st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=8).map(" ".join))


@pytest.mark.parametrize(
    ("training", "found"),
    [
        (LONG.upper().replace(" ", "  ") + "!", True),  # case, spacing and punctuation apart
        (f"Question: {LONG}. How many are left?", True),  # within a longer text
        (LONG.replace("noon", "dawn"), True),  # one word at the end: 13 of 14 runs of 5 stay
        (LONG.replace("them", "those"), False),  # in the middle: 5 of 14 runs are gone
        ("Tom has three apples and", False),
        ("", False),
    ],
)
def test_what_counts_as_known(training: str, found: bool) -> None:
    assert trained_on([LONG], [training], ngram=5, overlap=0.8) == [found]


def test_a_short_text_counts_by_its_whole_alone() -> None:
    found = trained_on(["2 + 3?", "4 + 5?"], ["What is 2 + 3?", "4 5"], ngram=5, overlap=0.5)
    assert found == [False, True]


def test_runs_of_several_training_texts_add_up() -> None:
    first, second = LONG[:45], LONG[30:]
    assert trained_on([LONG], [first], 3, 0.8) == [False]
    assert trained_on([LONG], [first, second], 3, 0.8) == [True]


@given(test=TEXTS, training=TEXTS, ngram=st.integers(2, 4))
def test_more_training_data_never_hides_a_prompt(
    test: list[str], training: list[str], ngram: int
) -> None:
    before = trained_on(test, training, ngram, 0.8)
    after = trained_on(test, training + test[:1], ngram, 0.8)
    assert all(a <= b for a, b in zip(before, after, strict=True))
    assert trained_on(test, test, ngram, 1.0) == [True] * len(test)


@pytest.mark.parametrize(
    ("recorded", "passed", "sentence"),
    [
        ([SCORER], True, "the scorers passed the reward audit"),
        ([{**SCORER, "scorer": "other"}, SCORER], True, "the scorers passed the reward audit"),
        ([{**SCORER, "passed": False, "holes": ["chain"]}], False, "reward audit (chain)"),
        ([SCORER, {**SCORER, "scorer": "rl", "passed": False}], False, "failed the reward audit"),
        ([{**SCORER, "scorer": "other"}], False, "records no reward audit of its scorer"),
        ([], False, "records no reward audit of its scorer"),
        (None, False, "records no reward audit of its scorer"),
        ("passed", False, "records no reward audit of its scorer"),
        ([{**SCORER, "passed": 1}], False, "failed the reward audit"),
        ([{"scorer": "answer_match"}], False, "failed the reward audit"),
        ([SCORER, "passed"], False, "failed the reward audit"),
        ([{"passed": True}], False, "records no reward audit of its scorer"),
    ],
)
def test_the_gate_can_ask_for_the_reward_audit(recorded: Any, passed: bool, sentence: str) -> None:
    asked = RULES.model_copy(update={"require_reward_audit": True})
    evaluation = {"scorer": "answer_match", "reward_audit": recorded}
    decision = with_reward_audit(decide(GOOD, RULES), evaluation, asked)
    outcome = decision.outcomes[-1]
    assert (outcome.rule, outcome.passed, decision.promote) == ("reward audit", passed, passed)
    assert sentence in outcome.sentence
    assert with_reward_audit(decide(GOOD, RULES), evaluation, RULES).promote
    assert not with_reward_audit(decide(GOOD, RULES), {"reward_audit": [{}]}, asked).promote
    refused = decide(replace(GOOD, kl=9.0), RULES)
    assert not with_reward_audit(refused, evaluation, asked).promote
