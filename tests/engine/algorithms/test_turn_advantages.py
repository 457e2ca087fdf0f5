"""Credit by turn, against numbers worked out by hand, over rows and over branches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.algorithms.advantages import AdvantageInputs, get_advantage
from engine.algorithms.masked import Turns
from engine.algorithms.shaping import last_turn
from engine.errors import ConfigError

# Turns of 2, 1 and 1 tokens; of 1 and 2; of 1. Between them lie tools' and users' turns.
MASK = torch.tensor([[1, 1, 0, 1, 0, 1], [0, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0]])
JUNK = math.nan
REWARDS = torch.tensor(
    [[0, 1, JUNK, 2, JUNK, 4], [JUNK, 3, 0, JUNK, 0, 1], [2, JUNK, 0, 0, 0, 0]],
    dtype=torch.float64,
)
VALUES = torch.tensor(
    [[0.5, 9, JUNK, 1, JUNK, 2], [JUNK, 1, JUNK, JUNK, 0.5, 9], [1, 0, 0, 0, 0, 0]],
    dtype=torch.float64,
)
GROUP = torch.zeros(3, dtype=torch.long)


def test_turns_are_runs_of_sampled_tokens() -> None:
    turns = Turns.of(MASK)
    assert turns.present.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    clean = torch.where(MASK.bool(), REWARDS, 0.0)
    assert turns.sum(clean).tolist() == [[1, 2, 4], [3, 1, 0], [2, 0, 0]]
    firsts = turns.first(torch.where(MASK.bool(), VALUES, 0.0))
    assert firsts.tolist() == [[0.5, 1, 2], [1, 0.5, 0], [1, 0, 0]]
    tokens = turns.to_tokens(torch.arange(9.0).view(3, 3))
    assert tokens.tolist() == [[0, 0, 0, 1, 0, 2], [0, 3, 0, 0, 4, 4], [6, 0, 0, 0, 0, 0]]


def test_no_turn_at_all() -> None:
    turns = Turns.of(torch.zeros(2, 3))
    assert turns.sum(torch.ones(2, 3)).tolist() == [[0], [0]]
    assert turns.to_tokens(torch.ones(2, 1)).tolist() == [[0] * 3] * 2


def test_gae_by_turn() -> None:
    inputs = AdvantageInputs(REWARDS, MASK, GROUP, values=VALUES)
    out = get_advantage("gae_turn")(inputs, gamma=0.5, lam=0.5, whiten=False)
    # Row 0: δ = 1 + 0.5 − 0.5, 2 + 1 − 1, 4 − 2; A₂ = 2, A₁ = 2 + 0.25·2, A₀ = 1 + 0.25·2.5.
    # Row 1: δ = 3 + 0.25 − 1, 1 − 0.5; A₁ = 0.5, A₀ = 2.25 + 0.125. Row 2: 2 − 1.
    expected = [[1.625, 1.625, 0, 2.5, 0, 2], [0, 2.375, 0, 0, 0.5, 0.5], [1, 0, 0, 0, 0, 0]]
    assert out.advantages.tolist() == expected
    assert out.returns[0].tolist() == [2.125, 2.125, 0, 3.5, 0, 4]
    assert get_advantage("gae_turn")(inputs).advantages.sum() == pytest.approx(0, abs=1e-9)


def test_gae_by_turn_of_one_token_each_is_gae() -> None:
    draw = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 1]])
    rewards, values = torch.rand(2, 2, 6, generator=draw).double().unbind(0)
    inputs = AdvantageInputs(rewards, mask, torch.arange(2), values=values)
    options = {"gamma": 0.9, "lam": 0.7}
    ours = get_advantage("gae_turn")(inputs, **options)
    theirs = get_advantage("gae")(inputs, **options)
    torch.testing.assert_close(ours.advantages, theirs.advantages)
    torch.testing.assert_close(ours.returns, theirs.returns)


def test_grpo_by_turn() -> None:
    inputs = AdvantageInputs(REWARDS, MASK, GROUP)
    got = get_advantage("grpo_turn")(inputs, norm_adv_by_std_in_grpo=False).advantages
    # Episodes earn 7, 4, 2 (mean 13/3), from turn 1 on 6 and 1 (mean 3.5), from turn 2 on 4, alone.
    whole = [7 - 13 / 3, 4 - 13 / 3, 2 - 13 / 3]
    first, second = [2 * one for one in whole], [whole[0] + 2.5, whole[1] - 2.5]
    expected = torch.tensor(
        [
            [first[0], first[0], 0, second[0], 0, whole[0]],
            [0, first[1], 0, 0, second[1], second[1]],
            [first[2], 0, 0, 0, 0, 0],
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(got, expected)
    alone = get_advantage("grpo_turn")(inputs, turn_weight=0.0).advantages
    torch.testing.assert_close(alone, get_advantage("grpo")(inputs).advantages)
    with pytest.raises(ConfigError):
        get_advantage("grpo_turn")(inputs, weight_of_turns=1.0)


def test_discount_is_by_turn() -> None:
    rewards = torch.tensor([[0.0, 0, 0, 8], [0, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1]])
    out = get_advantage("grpo_turn")(
        AdvantageInputs(rewards, mask, torch.tensor([5, 5])), gamma=0.5
    )
    assert out.returns[0].tolist() == [4, 4, 0, 8]


def _branched() -> tuple[AdvantageInputs, Tensor]:
    """The three episodes, the first one in two rows: its last turn is a branch."""
    mask = torch.zeros(4, 6, dtype=torch.long)
    rewards = torch.zeros(4, 6, dtype=torch.float64)
    mask[0, :4], mask[1, 0], mask[2:] = MASK[0, :4], 1, MASK[1:]
    rewards[0, :4], rewards[1, 0], rewards[2:] = REWARDS[0, :4], 4, REWARDS[1:]
    values = torch.zeros(4, 6, dtype=torch.float64)
    values[0, :4], values[1, 0], values[2:] = VALUES[0, :4], 2, VALUES[1:]
    inputs = AdvantageInputs(
        rewards,
        mask,
        torch.zeros(4, dtype=torch.long),
        values=values,
        episode_ids=torch.tensor([6, 6, 2, 9]),
        first_turn=torch.tensor([0, 2, 0, 0]),
    )
    return inputs, torch.tensor([0, 2, 3])


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg", "maxrl", "grpo_turn", "gae_turn"])
def test_an_episode_of_two_rows_is_one_completion(name: str) -> None:
    options = {"whiten": False} if name == "gae_turn" else {}
    branched, whole_rows = _branched()
    whole = AdvantageInputs(REWARDS, MASK, GROUP, values=VALUES)
    got = get_advantage(name)(branched, **options).advantages
    wanted = get_advantage(name)(whole, **options).advantages
    torch.testing.assert_close(got[whole_rows[1:]], wanted[1:])
    torch.testing.assert_close(got[0, :4], wanted[0, :4])
    torch.testing.assert_close(got[1, 0], wanted[0, 5])


def test_the_last_turn_is_what_was_sampled_after_the_last_break() -> None:
    assert last_turn(MASK).long().tolist() == [
        [0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 1, 1],
        [1, 0, 0, 0, 0, 0],
    ]
    assert not last_turn(torch.zeros(1, 3)).any()
