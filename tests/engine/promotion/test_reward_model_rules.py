"""When a reward model becomes the champion, by the held-out pairs that it ranks right."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config.pipeline import RewardModelGateConfig
from engine.promotion.gate import decide_reward_model

RULES = RewardModelGateConfig()


def ranked(right: int, of: int = 100) -> np.ndarray:
    return np.arange(of) < right


@pytest.mark.parametrize(("right", "promoted"), [(59, False), (61, True)])
def test_a_first_one_must_rank_better_than_chance(right: int, promoted: bool) -> None:
    decision = decide_reward_model(ranked(right), None, RULES)
    assert decision.promote is promoted
    [outcome] = decision.outcomes
    assert outcome.rule == "accuracy"
    assert isinstance(outcome.value, list)
    assert (outcome.value[1] > 0.5) is promoted


@pytest.mark.parametrize(("right", "promoted"), [(80, False), (82, False), (90, True), (70, False)])
def test_a_later_one_must_gain_over_the_champion_on_the_same_pairs(
    right: int, promoted: bool
) -> None:
    decision = decide_reward_model(ranked(right), ranked(80), RULES)
    assert decision.promote is promoted
    assert f"{right - 80:+.2f} percentage points" in decision.reason
    loose = RULES.model_copy(update={"minimum_gain": -0.5})
    assert decide_reward_model(ranked(right), ranked(80), loose).promote


@pytest.mark.parametrize("pairs", [0, 5, 99])
def test_on_few_held_out_pairs_nothing_is_promoted(pairs: int) -> None:
    decision = decide_reward_model(ranked(pairs, pairs), None, RULES)
    assert not decision.promote
    assert f"{pairs} pairs are held out" in decision.reason
