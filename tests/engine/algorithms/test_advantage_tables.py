"""Each estimator against numbers worked out by hand."""

import math
import statistics

import pytest
import torch

from engine.algorithms import advantages
from engine.algorithms.advantages import AdvantageInputs, get_advantage
from engine.errors import ConfigError, DataError

NAN = math.nan
# Two prompts: rows 0-2 score 1, 0, 0.5 (mean 0.5, std 0.5), rows 3-4 score 2, 0 (mean 1, std √2).
# Row 1 has a tool's turn in the middle. What lies outside the mask is garbage on purpose.
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0]])
REWARDS = torch.tensor(
    [[0, 0, 1], [0, NAN, 0], [0, 0.5, NAN], [0, 2, math.inf], [0, NAN, NAN]], dtype=torch.float64
)
GROUPS = torch.tensor([7, 7, 7, 3, 3])
INPUTS = AdvantageInputs(REWARDS, MASK, GROUPS)
ROOT2 = math.sqrt(2)


def _check(name: str, by_row: list[float], inputs: AdvantageInputs = INPUTS, **options) -> None:
    got = get_advantage(name)(inputs, **options).advantages
    expected = torch.tensor(by_row, dtype=got.dtype)[:, None] * MASK
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-9)


def test_grpo() -> None:
    _check("grpo", [1, -1, 0, 1 / ROOT2, -1 / ROOT2])


def test_dr_grpo() -> None:
    _check("grpo", [0.5, -0.5, 0, 1, -1], norm_adv_by_std_in_grpo=False)


def test_grpo_epsilon_is_added_to_the_deviation() -> None:
    _check("grpo", [0.5, -0.5, 0, 1 / (ROOT2 + 0.5), -1 / (ROOT2 + 0.5)], epsilon=0.5)


def test_rloo() -> None:
    # 1 − (0 + 0.5)/2, 0 − (1 + 0.5)/2, 0.5 − (1 + 0)/2, 2 − 0, 0 − 2
    _check("rloo", [0.75, -0.75, 0, 2, -2])


def test_opo() -> None:
    # baselines (3·1 + 2·0 + 2·0.5)/7 = 4/7 and (2·2 + 1·0)/3 = 4/3
    _check("opo", [3 / 7, -4 / 7, -1 / 14, 2 / 3, -4 / 3])


def test_grpo_passk() -> None:
    _check("grpo_passk", [0.5 / 0.5, 0, 0, 2 / ROOT2, 0])
    _check("grpo_passk", [0.5, 0, 0, 2, 0], norm_adv_by_std_in_grpo=False)


def test_grpo_passk_tie_for_the_best() -> None:
    rewards = REWARDS.clone()
    rewards[1, 2] = 1
    _check("grpo_passk", [0, 0, 0, 2 / ROOT2, 0], AdvantageInputs(rewards, MASK, GROUPS))


def test_gpg() -> None:
    # three of five scores are not 0: alpha = 5/3
    _check("gpg", [5 / 6, -5 / 6, 0, 5 / 3, -5 / 3])
    _check("gpg", [5 / 12, -5 / 12, 0, 5 / 6, -5 / 6], f_norm=2.0)


def test_maxrl() -> None:
    _check("maxrl", [1, -1, 0, 1, -1])


def test_maxrl_without_success_is_zero() -> None:
    for score in (0.0, -1.0):
        rewards = torch.zeros_like(REWARDS)
        rewards[0, 0] = rewards[3, 0] = score
        _check("maxrl", [0, 0, 0, 0, 0], AdvantageInputs(rewards, MASK, GROUPS))


def test_remax() -> None:
    baseline = torch.tensor([0.5, 0.5, 0, 1, 1])
    inputs = AdvantageInputs(REWARDS, MASK, GROUPS, baseline_rewards=baseline)
    _check("remax", [0.5, -0.5, 0.5, 1, -1], inputs)
    returns = get_advantage("remax")(inputs).returns
    assert returns.tolist() == [[1, 1, 1], [0, 0, 0], [0.5, 0.5, 0], [2, 2, 0], [0, 0, 0]]


def test_reinforce_plus_plus() -> None:
    out = get_advantage("reinforce_plus_plus")(INPUTS, gamma=0.5)
    returns = [[0.25, 0.5, 1], [0, 0, 0], [0.25, 0.5, 0], [1, 2, 0], [0, 0, 0]]
    assert out.returns.tolist() == returns
    # The ten entries inside the mask have mean 0.55 and variance 3.6/9 = 0.4.
    expected = (torch.tensor(returns) - 0.55) / math.sqrt(0.4) * MASK
    torch.testing.assert_close(out.advantages.float(), expected)


def test_reinforce_plus_plus_baseline() -> None:
    # By token: 0.5 ×3, −0.5 ×2, 0 ×2, 1 ×2, −1: mean 0.15, variance (4.25 − 0.225)/9.
    deviation = math.sqrt(4.025 / 9)
    centered = [0.5, -0.5, 0, 1, -1]
    _check("reinforce_plus_plus_baseline", [(x - 0.15) / deviation for x in centered])


def test_gdpo() -> None:
    components = torch.tensor([[1, 0], [0, 1], [0.5, 1], [2, 3], [0, 3]], dtype=torch.float64)
    inputs = AdvantageInputs(REWARDS, MASK, GROUPS, reward_components=components)
    # GRPO of the second component: (0 − 2/3)/(1/√3) = −2/√3, then 1/√3 twice; 0 in the second
    # group, where all are equal.
    second = [-2 / math.sqrt(3), 1 / math.sqrt(3), 1 / math.sqrt(3), 0, 0]
    first = [1, -1, 0, 1 / ROOT2, -1 / ROOT2]
    rows = [a + 2 * b for a, b in zip(first, second, strict=True)]
    tokens = [x for x, n in zip(rows, [3, 2, 2, 2, 1], strict=True) for _ in range(n)]
    mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens)
    expected = [(x - mean) / deviation for x in rows]
    _check("gdpo", expected, inputs, gdpo_reward_weights=[1.0, 2.0])
    by_token = torch.full((5, 3, 2), NAN, dtype=torch.float64)
    by_token[MASK.bool()] = 0
    by_token[:, 0] = components
    inputs = AdvantageInputs(REWARDS, MASK, GROUPS, reward_components=by_token)
    _check("gdpo", expected, inputs, gdpo_reward_weights=[1.0, 2.0])
    with pytest.raises(ConfigError, match=r"1 entries but the reward returns 2 components"):
        get_advantage("gdpo")(inputs, gdpo_reward_weights=[1.0])


def test_a_component_that_doesn_t_apply_adds_nothing_to_gdpo() -> None:
    components = torch.tensor([[1, 3], [0, NAN], [0.5, 1], [2, NAN], [0, 9]], dtype=torch.float64)
    inputs = AdvantageInputs(REWARDS, MASK, GROUPS, reward_components=components)
    # The second: (3 − 2)/√2 and its opposite; a row that is alone with it in its group gets 0.
    second = [1 / math.sqrt(2), 0, -1 / math.sqrt(2), 0, 0]
    first = [1, -1, 0, 1 / ROOT2, -1 / ROOT2]
    rows = [a + b for a, b in zip(first, second, strict=True)]
    tokens = [x for x, n in zip(rows, [3, 2, 2, 2, 1], strict=True) for _ in range(n)]
    mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens)
    _check("gdpo", [(x - mean) / deviation for x in rows], inputs)


def test_gae_carries_over_a_tool_turn() -> None:
    values = torch.tensor([[0.2, 0.4, 0.6], [0.2, NAN, 0.6]], dtype=torch.float64)
    inputs = AdvantageInputs(REWARDS[:2], MASK[:2], GROUPS[:2], values=values)
    out = get_advantage("gae")(inputs, gamma=0.5, lam=0.5, whiten=False)
    # Row 0: δ = (0 + .5·.4 − .2, 0 + .5·.6 − .4, 1 − .6) = (0, −.1, .4); L = (0, 0, .4).
    # Row 1 skips its middle: δ_2 = −.6; δ_0 = .5·.6 − .2 = .1; L_0 = .1 + .25·(−.6) = −.05.
    expected = torch.tensor([[0, 0, 0.4], [-0.05, 0, -0.6]], dtype=torch.float64)
    torch.testing.assert_close(out.advantages, expected, rtol=0, atol=1e-12)
    returns = torch.tensor([[0.2, 0.4, 1.0], [0.15, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(out.returns, returns, rtol=0, atol=1e-12)
    white = get_advantage("gae")(inputs, gamma=0.5, lam=0.5).advantages
    entries = [0, 0, 0.4, -0.05, -0.6]
    mean, deviation = statistics.fmean(entries), statistics.stdev(entries)
    assert white[1, 2].item() == pytest.approx((-0.6 - mean) / deviation, rel=1e-6)
    assert white[1, 1].item() == 0


def _otb(mask: list[list[int]], **options) -> list[list[float]]:
    """Row 0: reward 1 at its second token, energies ½, ½; row 1: one token of energy 1."""
    m = torch.tensor(mask)
    rewards, old, squared = (torch.full(m.shape, NAN, dtype=torch.float64) for _ in range(3))
    rewards[m.bool()] = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    old[m.bool()] = torch.tensor([0.5, 0.5, 0.25], dtype=torch.float64).log()
    squared[m.bool()] = 0.5
    inputs = AdvantageInputs(
        rewards, m, torch.zeros(2, dtype=torch.long), old_log_probs=old, sum_pi_squared=squared
    )
    return get_advantage("optimal_token_baseline")(inputs, **options).advantages.tolist()


def test_optimal_token_baseline() -> None:
    # b_0 = (1·½ + 0·1)/(½ + 1) = 1/3; only row 0 has a second token.
    third = pytest.approx(1 / 3, abs=1e-6)
    lead = pytest.approx(2 / 3, abs=1e-6)
    assert [-x for x in _otb([[1, 1], [1, 0]])[1]] == [third, 0]
    assert _otb([[1, 1], [1, 0]])[0] == [lead, 1]
    tail = _otb([[1, 1], [1, 0]], handle_zero_tail=False)[0]
    assert tail == [lead, pytest.approx(0, abs=1e-6)]
    # A tool's turn between the tokens changes nothing.
    assert _otb([[1, 0, 1], [0, 1, 0]])[0] == [lead, 0, 1]


def test_optimal_token_baseline_weighs_energy_by_the_squared_correction() -> None:
    mask = torch.ones(2, 1)
    inputs = AdvantageInputs(
        torch.tensor([[1.0], [0.0]]),
        mask,
        torch.zeros(2, dtype=torch.long),
        old_log_probs=torch.full((2, 1), 0.5).log(),
        sum_pi_squared=torch.full((2, 1), 0.5),
        rollout_is_weights=torch.tensor([[2.0], [1.0]]),
    )
    # energies ½·4 and ½: b = 2/2.5
    got = get_advantage("optimal_token_baseline")(inputs).advantages.squeeze(1)
    assert got.tolist() == [pytest.approx(0.2), pytest.approx(-0.8)]


ALONE = AdvantageInputs(
    torch.tensor([[0.0, 3.0]]),
    torch.ones(1, 2),
    torch.tensor([4]),
    values=torch.zeros(1, 2),
    reward_components=torch.tensor([[3.0]]),
    baseline_rewards=torch.tensor([1.0]),
    old_log_probs=torch.full((1, 2), -1.0),
    sum_pi_squared=torch.full((1, 2), 0.5),
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gae", 0.0),
        ("gae_turn", 0.0),
        ("gdpo", 0.0),
        ("gpg", 3.0),
        ("grpo", 3 / (1 + 0)),
        ("grpo_passk", 0.0),
        ("grpo_turn", 3.0),
        ("maxrl", 0.0),
        ("opo", 3.0),
        ("optimal_token_baseline", 3.0),
        ("reinforce_plus_plus", 0.0),
        ("reinforce_plus_plus_baseline", 0.0),
        ("remax", 2.0),
        ("rloo", 0.0),
    ],
)
def test_a_group_of_one_is_defined(name: str, expected: float) -> None:
    got = get_advantage(name)(ALONE).advantages
    assert got.tolist() == [[pytest.approx(expected, abs=1e-3)] * 2]


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "gdpo"])
def test_without_epsilon_equal_scores_still_give_zero(name: str) -> None:
    inputs = AdvantageInputs(
        torch.ones(3, 1),
        torch.ones(3, 1),
        torch.zeros(3, dtype=torch.long),
        reward_components=torch.ones(3, 2),
    )
    assert get_advantage(name)(inputs, epsilon=0.0).advantages.tolist() == [[0.0]] * 3


def test_groups_of_one_are_covered_for_every_estimator() -> None:
    mark = test_a_group_of_one_is_defined.pytestmark[0]  # type: ignore[attr-defined]
    # Other tests register estimators of their own.
    modules = {name: get_advantage(name).formula.__module__ for name in advantages.names()}
    ours = {name for name, module in modules.items() if module.startswith("engine.")}
    assert {case[0] for case in mark.args[1]} == ours


def test_missing_inputs_and_wrong_shapes_are_refused() -> None:
    with pytest.raises(DataError, match=r"'gae' needs values: a critic"):
        get_advantage("gae")(INPUTS)
    with pytest.raises(DataError, match=r"values has shape \[5, 2\] but response_mask \[5, 3\]"):
        get_advantage("gae")(AdvantageInputs(REWARDS, MASK, GROUPS, values=torch.zeros(5, 2)))
    with pytest.raises(DataError, match=r"group_ids has shape \[4\]"):
        get_advantage("grpo")(AdvantageInputs(REWARDS, MASK, GROUPS[:4]))
    broken = REWARDS.clone()
    broken[3, 1] = NAN
    with pytest.raises(DataError, match=r"token_level_rewards is NaN .* first in row 3"):
        get_advantage("grpo")(AdvantageInputs(broken, MASK, GROUPS))
    endless = torch.tensor([1.0, 2.0, math.inf, 1.0, 1.0])
    with pytest.raises(DataError, match=r"baseline_rewards is NaN or infinite .* first in row 2"):
        get_advantage("remax")(AdvantageInputs(REWARDS, MASK, GROUPS, baseline_rewards=endless))
    with pytest.raises(ConfigError, match=r"rollout.n=1 with algorithm.adv_estimator=grpo"):
        advantages.check_group_size("grpo", 1)
    advantages.check_group_size("grpo", 2)
    advantages.check_group_size("gae", 1)
