"""Properties that hold for every estimator, and published special cases."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.algorithms import advantages
from engine.algorithms.advantages import AdvantageInputs, get_advantage
from engine.algorithms.masked import reward_to_go

SEEDS = st.integers(0, 2**31)
OUTCOME = ("gpg", "grpo", "grpo_passk", "opo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators whose advantage is relative to the group: a constant added to all scores is lost."""
BY_TOKEN = ("values", "old_log_probs", "sum_pi_squared", "token_level_rewards")


def random_inputs(seed: int, rows: int = 9, width: int = 6, min_group: int = 1) -> AdvantageInputs:
    """Everything any estimator reads, float64, with turns masked out and an empty row."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    mask = rand(rows, width) < 0.7
    mask[rows // 2] = False
    ids = torch.randint(0, 3, (rows,), generator=g) * 11
    if min_group > 1:
        mask[:, 0] = True
        ids = torch.arange(rows) % (rows // min_group)
    return AdvantageInputs(
        token_level_rewards=rand(rows, width) * (rand(rows, width) < 0.5),
        response_mask=mask.float(),
        group_ids=ids,
        values=rand(rows, width),
        reward_components=rand(rows, 3),
        baseline_rewards=rand(rows),
        old_log_probs=rand(rows, width).log(),
        sum_pi_squared=rand(rows, width),
    )


def _garbage(inputs: AdvantageInputs, seed: int) -> AdvantageInputs:
    junk = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30], dtype=torch.float64)
    g = torch.Generator().manual_seed(seed)
    changed: dict[str, Any] = {}
    for name in BY_TOKEN:
        value = getattr(inputs, name)
        drawn = junk[torch.randint(0, 4, value.shape, generator=g)]
        changed[name] = torch.where(inputs.response_mask.bool(), value, drawn)
    return dataclasses.replace(inputs, **changed)


@pytest.mark.parametrize("name", advantages.names())
@given(SEEDS)
def test_garbage_outside_the_mask_changes_no_bit(name: str, seed: int) -> None:
    inputs = random_inputs(seed)
    clean, dirty = get_advantage(name)(inputs), get_advantage(name)(_garbage(inputs, seed))
    assert torch.equal(clean.advantages, dirty.advantages)
    assert torch.equal(clean.returns, dirty.returns)
    assert clean.advantages.isfinite().all()
    outside = ~inputs.response_mask.bool()
    assert (clean.advantages[outside] == 0).all()
    assert (clean.returns[outside] == 0).all()


@pytest.mark.parametrize("name", advantages.names())
@given(SEEDS)
def test_permuting_rows_and_renaming_groups_permutes_the_result(name: str, seed: int) -> None:
    inputs = random_inputs(seed)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    moved = {
        field.name: value[order]
        for field in dataclasses.fields(inputs)
        if (value := getattr(inputs, field.name)) is not None
    }
    moved["group_ids"] = -5 * moved["group_ids"] + 2
    before = get_advantage(name)(inputs).advantages
    after = get_advantage(name)(AdvantageInputs(**moved)).advantages
    torch.testing.assert_close(after, before[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", advantages.names())
@given(SEEDS)
def test_completions_without_tokens_have_no_say(name: str, seed: int) -> None:
    inputs = random_inputs(seed)
    alive = inputs.response_mask.bool().any(1)
    left = {
        field.name: value[alive]
        for field in dataclasses.fields(inputs)
        if (value := getattr(inputs, field.name)) is not None
    }
    whole = get_advantage(name)(inputs).advantages[alive]
    torch.testing.assert_close(
        get_advantage(name)(AdvantageInputs(**left)).advantages, whole, rtol=1e-9, atol=1e-9
    )


def _shifted(inputs: AdvantageInputs, by: float) -> AdvantageInputs:
    """Add `by` to every row's score, on its first token inside the mask."""
    mask = inputs.response_mask.bool()
    first = mask & (mask.long().cumsum(1) == 1)
    return dataclasses.replace(inputs, token_level_rewards=inputs.token_level_rewards + by * first)


@pytest.mark.parametrize("name", [n for n in OUTCOME if n != "gpg"])
@given(SEEDS, st.floats(-5, 5))
def test_group_relative_advantages_ignore_a_shift(name: str, seed: int, by: float) -> None:
    inputs = random_inputs(seed, min_group=3)
    before = get_advantage(name)(inputs).advantages
    after = get_advantage(name)(_shifted(inputs, by)).advantages
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "maxrl"])
@given(SEEDS, st.floats(0.5, 20))
def test_normalised_advantages_ignore_a_scale(name: str, seed: int, by: float) -> None:
    inputs = random_inputs(seed, min_group=3)
    scaled = dataclasses.replace(inputs, token_level_rewards=by * inputs.token_level_rewards)
    options = {} if name == "maxrl" else {"epsilon": 0.0}
    before = get_advantage(name)(inputs, **options).advantages
    after = get_advantage(name)(scaled, **options).advantages
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["rloo", "opo", "gpg", "remax", "optimal_token_baseline"])
@given(SEEDS, st.floats(0.5, 20))
def test_linear_advantages_scale_with_rewards(name: str, seed: int, by: float) -> None:
    inputs = random_inputs(seed, min_group=3)
    scaled = dataclasses.replace(
        inputs,
        token_level_rewards=by * inputs.token_level_rewards,
        baseline_rewards=by * inputs.need("baseline_rewards"),
    )
    before = get_advantage(name)(inputs).advantages
    torch.testing.assert_close(get_advantage(name)(scaled).advantages, by * before)


@pytest.mark.parametrize("name", [*OUTCOME, "maxrl", "gdpo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [0.0, 0.1, 1 / 3, -7.7])
def test_equal_groups_give_exactly_zero(name: str, dtype: torch.dtype, score: float) -> None:
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1], [1, 1], [1, 1], [1, 1]])
    rewards = torch.zeros(7, 2, dtype=dtype)
    rewards[mask.long().cumsum(1) == 1] = 0
    for row in range(7):
        rewards[row, mask[row].nonzero()[0]] = score
    inputs = AdvantageInputs(
        rewards,
        mask,
        torch.tensor([0, 0, 0, 1, 1, 1, 1]),
        reward_components=torch.full((7, 2), score, dtype=dtype),
    )
    got = get_advantage(name)(inputs).advantages
    assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.parametrize("name", advantages.names())
def test_an_empty_mask_gives_zeros(name: str) -> None:
    inputs = random_inputs(0)
    empty = dataclasses.replace(inputs, response_mask=torch.zeros_like(inputs.response_mask))
    out = get_advantage(name)(empty)
    assert torch.equal(out.advantages, torch.zeros(9, 6, dtype=out.advantages.dtype))
    assert torch.equal(out.returns, torch.zeros(9, 6, dtype=out.returns.dtype))


@pytest.mark.parametrize("name", advantages.names())
def test_low_precision_and_integer_rewards_are_computed_in_float32(name: str) -> None:
    inputs = random_inputs(3)
    low = dataclasses.replace(
        inputs,
        token_level_rewards=inputs.token_level_rewards.round().to(torch.long),
        values=inputs.need("values").bfloat16(),
        response_mask=inputs.response_mask.bool(),
    )
    got = get_advantage(name)(low).advantages
    assert got.dtype in (torch.float32, torch.float64)
    assert got.isfinite().all()


@given(SEEDS, st.floats(0, 1))
def test_gae_with_lambda_one_is_the_return_minus_the_value(seed: int, gamma: float) -> None:
    inputs = random_inputs(seed)
    out = get_advantage("gae")(inputs, gamma=gamma, lam=1.0, whiten=False)
    mask = inputs.response_mask
    discounted = reward_to_go(inputs.token_level_rewards, mask, gamma)
    torch.testing.assert_close(out.advantages, (discounted - inputs.need("values")) * mask)
    torch.testing.assert_close(out.returns, discounted * mask)


@given(SEEDS, st.floats(0, 1))
def test_gae_with_lambda_zero_is_the_one_step_error(seed: int, gamma: float) -> None:
    inputs = dataclasses.replace(random_inputs(seed), response_mask=torch.ones(9, 6))
    values = inputs.need("values")
    following = torch.cat([values[:, 1:], torch.zeros(9, 1, dtype=torch.float64)], 1)
    out = get_advantage("gae")(inputs, gamma=gamma, lam=0.0, whiten=False)
    expected = inputs.token_level_rewards + gamma * following - values
    torch.testing.assert_close(out.advantages, expected)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax", "optimal_token_baseline"])
@given(SEEDS)
def test_a_masked_turn_changes_nothing_for_the_tokens_around_it(name: str, seed: int) -> None:
    whole = dataclasses.replace(random_inputs(seed), response_mask=torch.ones(9, 6))
    g = torch.Generator().manual_seed(seed)
    columns = torch.randperm(9, generator=g)[:6].sort().values
    spread: dict[str, Any] = {"response_mask": torch.zeros(9, 9)}
    spread["response_mask"][:, columns] = 1
    for field in BY_TOKEN:
        spread[field] = torch.full((9, 9), torch.nan, dtype=torch.float64)
        spread[field][:, columns] = getattr(whole, field)
    before = get_advantage(name)(whole)
    after = get_advantage(name)(dataclasses.replace(whole, **spread))
    torch.testing.assert_close(after.advantages[:, columns], before.advantages)
    torch.testing.assert_close(after.returns[:, columns], before.returns)


@given(SEEDS)
def test_rloo_is_its_leave_one_out_form(seed: int) -> None:
    inputs = random_inputs(seed, min_group=3)
    scores, ids = inputs.scores, inputs.group_ids
    alive = inputs.response_mask.bool().any(1)
    got = get_advantage("rloo")(inputs).advantages[:, 0]
    for row in alive.nonzero().flatten().tolist():
        others = alive & (ids == ids[row])
        others[row] = False
        assert got[row].item() == pytest.approx((scores[row] - scores[others].mean()).item())


@given(SEEDS)
def test_gdpo_with_one_component_is_whitened_grpo(seed: int) -> None:
    inputs = random_inputs(seed, min_group=3)
    one = dataclasses.replace(inputs, reward_components=inputs.scores[:, None])
    grpo = get_advantage("grpo")(inputs).advantages[inputs.response_mask.bool()]
    gdpo = get_advantage("gdpo")(one).advantages[inputs.response_mask.bool()]
    torch.testing.assert_close(gdpo, (grpo - grpo.mean()) / grpo.std(), rtol=1e-6, atol=1e-7)


@given(SEEDS)
def test_opo_with_equal_lengths_is_dr_grpo(seed: int) -> None:
    inputs = dataclasses.replace(random_inputs(seed), response_mask=torch.ones(9, 6))
    opo = get_advantage("opo")(inputs).advantages
    dr_grpo = get_advantage("grpo")(inputs, norm_adv_by_std_in_grpo=False).advantages
    torch.testing.assert_close(opo, dr_grpo)


@given(SEEDS)
def test_maxrl_sums_to_the_gradient_of_the_successes(seed: int) -> None:
    """With binary scores the positive part of a group adds up to its number of failures."""
    g = torch.Generator().manual_seed(seed)
    scores = (torch.rand(8, generator=g) < 0.5).double()
    ids = torch.arange(8) // 4
    got = get_advantage("maxrl")(AdvantageInputs(scores[:, None], torch.ones(8, 1), ids))
    for group in (0, 1):
        part, won = got.advantages[ids == group, 0], scores[ids == group]
        assert part.sum().item() == pytest.approx(0, abs=1e-9)
        if won.any():
            assert part[won > 0].sum().item() == pytest.approx(4 - won.sum().item())


def test_advantages_carry_no_gradient() -> None:
    inputs = random_inputs(1)
    rewards = inputs.token_level_rewards.requires_grad_()
    out = get_advantage("grpo")(dataclasses.replace(inputs, token_level_rewards=rewards))
    assert not out.advantages.requires_grad
