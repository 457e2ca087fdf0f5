"""Preference losses by hand, gradients in float64, special cases."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.algorithms import preference_losses
from engine.algorithms.aggregation import compute_means
from engine.algorithms.preference_losses import Pairs, bradley_terry, get_pair_loss, kto, log1mexp
from engine.errors import ConfigError, DataError


def _row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Log-ratios 2 and −1 (difference 3) of lengths 4 and 2: 0.5 and −0.5 a token (difference 1).
PAIRS = Pairs(
    policy_chosen=_row(-4.0),
    policy_rejected=_row(-6.0),
    chosen_length=_row(4),
    rejected_length=_row(2),
    ref_chosen=_row(-6.0),
    ref_rejected=_row(-5.0),
)


def _nls(x: float) -> float:
    """−log σ(x)."""
    return math.log1p(math.exp(-x))


def _odds_loss() -> float:
    chosen, rejected = -1.0, -3.0
    log_odds = [x - math.log(1 - math.exp(x)) for x in (chosen, rejected)]
    return -chosen + 0.1 * _nls(log_odds[0] - log_odds[1])


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sigmoid", {}, _nls(0.3)),
        ("dpo", {"beta": 0.5}, _nls(1.5)),
        ("sigmoid", {"label_smoothing": 0.2}, 0.8 * _nls(0.3) + 0.2 * _nls(-0.3)),
        ("sigmoid", {"length_normalize": True, "beta": 2.0}, _nls(2.0)),
        ("hinge", {}, 0.7),
        ("hinge", {"beta": 0.5}, 0.0),
        ("ipo", {"length_normalize": False}, (3 - 5) ** 2),
        ("ipo", {"beta": 0.25}, (1 - 2) ** 2),
        ("robust", {"label_smoothing": 0.2}, (0.8 * _nls(0.3) - 0.2 * _nls(-0.3)) / 0.6),
        ("simpo", {}, _nls(2.0 * (-1 + 3) - 0.5)),
        ("orpo", {}, _odds_loss()),
        ("likelihood", {"beta": 0.5, "sft_weight": 0.25}, _nls(1.0) + 0.25),
    ],
)
def test_pair_losses_by_hand(name: str, options: dict, expected: float) -> None:
    out = get_pair_loss(name)(PAIRS, **options)
    assert out.loss.tolist() == [pytest.approx(expected, abs=1e-12)]
    assert compute_means(out.metrics)["rewards/accuracies"] == 1.0


def test_every_pair_loss_has_a_table_entry() -> None:
    mark = test_pair_losses_by_hand.pytestmark[0]  # type: ignore[attr-defined]
    assert {case[0] for case in mark.args[1]} >= set(preference_losses.names())


def test_implicit_rewards() -> None:
    metrics = compute_means(get_pair_loss("dpo")(PAIRS).metrics)
    assert metrics["rewards/chosen"] == pytest.approx(0.2)
    assert metrics["rewards/rejected"] == pytest.approx(-0.1)
    assert metrics["rewards/margins"] == pytest.approx(0.3)


@pytest.mark.parametrize("name", preference_losses.names())
def test_pair_gradients_match_finite_differences_and_spare_the_reference(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    chosen, rejected, ref_chosen, ref_rejected = (
        -torch.rand(4, generator=g, dtype=torch.float64) * 9 - 0.5 for _ in range(4)
    )
    lengths = torch.tensor([1, 2, 3, 4])
    ref_chosen.requires_grad_()

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return get_pair_loss(name)(Pairs(a, b, lengths, lengths, ref_chosen, ref_rejected)).loss

    inputs = (chosen.requires_grad_(), rejected.requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs)
    loss(*inputs).sum().backward()
    assert ref_chosen.grad is None


@pytest.mark.parametrize("name", preference_losses.names())
@given(st.integers(0, 2**31))
def test_a_pair_loss_is_a_function_of_its_row(name: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    columns = [-torch.rand(6, generator=g, dtype=torch.float64) * 5 for _ in range(4)]
    lengths = torch.randint(1, 9, (2, 6), generator=g)
    entry, order = get_pair_loss(name), torch.randperm(6, generator=g)[:3]

    def loss(rows: Tensor) -> Tensor:
        a, b, c, d = (x[rows] for x in columns)
        return entry(Pairs(a, b, lengths[0][rows], lengths[1][rows], c, d)).loss

    torch.testing.assert_close(loss(order), loss(torch.arange(6))[order], rtol=0, atol=0)


def test_dpo_at_the_reference_is_log_two() -> None:
    same = replace(PAIRS, ref_chosen=PAIRS.policy_chosen, ref_rejected=PAIRS.policy_rejected)
    assert get_pair_loss("dpo")(same).loss.item() == pytest.approx(math.log(2))


def test_robust_without_noise_is_dpo() -> None:
    robust = get_pair_loss("robust")(PAIRS, label_smoothing=0.0).loss
    torch.testing.assert_close(robust, get_pair_loss("dpo")(PAIRS).loss)


def test_extreme_log_probs_stay_finite() -> None:
    for chosen, rejected in ((-1e4, -1e-9), (0.0, -1e4), (0.0, 0.0)):
        for name in preference_losses.names():
            pairs = replace(
                PAIRS,
                policy_chosen=_row(chosen).float().requires_grad_(),
                policy_rejected=_row(rejected).float().requires_grad_(),
            )
            loss = get_pair_loss(name)(pairs).loss
            gradients = torch.autograd.grad(loss.sum(), pairs.policy_chosen)
            assert loss.isfinite().all(), name
            assert gradients[0].isfinite().all(), name


def test_log1mexp_at_both_ends() -> None:
    for x in (-1e-12, -1e-3, -0.5, -0.7, -5.0, -50.0):
        expected = math.log(-math.expm1(x))
        assert log1mexp(_row(x)).item() == pytest.approx(expected, rel=1e-9)


def test_wrong_pairs_are_refused() -> None:
    with pytest.raises(DataError, match=r"'sigmoid' compares with a reference model"):
        get_pair_loss("dpo")(replace(PAIRS, ref_chosen=None))
    with pytest.raises(DataError, match="rejected_length has an empty response"):
        get_pair_loss("simpo")(replace(PAIRS, rejected_length=_row(0)))
    with pytest.raises(DataError, match=r"ref_chosen has shape \[2\], not \[1\]"):
        get_pair_loss("dpo")(replace(PAIRS, ref_chosen=_row(1, 2)))
    for name, options, message in (
        ("dpo", {"beta": 0}, "beta=0 must be above 0"),
        ("robust", {"label_smoothing": 0.5}, "label_smoothing=0.5"),
        ("simpo", {"simpo_gamma": -1}, "simpo_gamma=-1"),
        ("likelihood", {"sft_weight": -1}, "sft_weight=-1"),
        ("hinge", {"label_smoothing": 0.1}, "'hinge' doesn't read 'label_smoothing'"),
    ):
        with pytest.raises(ConfigError, match=message):
            get_pair_loss(name)(PAIRS, **options)


def test_sequence_log_probs_skip_what_is_masked() -> None:
    log_probs = torch.tensor([[-1.0, math.nan, -2.0], [math.nan] * 3])
    summed, lengths = preference_losses.sequence_log_probs(
        log_probs, torch.tensor([[1, 0, 1], [0, 0, 0]])
    )
    assert summed.tolist() == [-3, 0]
    assert lengths.tolist() == [2, 0]


def test_kto_by_hand() -> None:
    ratio, good = _row(2.0, 2.0, -1.0), torch.tensor([True, False, False])
    out = kto(ratio, torch.zeros(3), good, 1.0, beta=0.5, undesirable_weight=2.0)
    up = 1 / (1 + math.exp(-0.5))  # σ(β(2 − 1))
    down = 1 / (1 + math.exp(-1.0))  # σ(β(1 + 1))
    assert out.loss.tolist() == pytest.approx([1 - up, 2 * up, 2 * (1 - down)])
    metrics = compute_means(out.metrics)
    assert (metrics["rewards/chosen"], metrics["rewards/rejected"]) == (1.0, 0.25)


def test_kto_gradient_and_reference_point() -> None:
    policy = _row(0.3, -2.0, 1.4).requires_grad_()
    good = torch.tensor([True, False, True])
    assert torch.autograd.gradcheck(lambda x: kto(x, _row(0, -1, 1), good, 0.2).loss, (policy,))
    assert preference_losses.kto_reference_point(_row(1, 3), _row(0, 0)).item() == 2
    assert preference_losses.kto_reference_point(_row(-1, -3), _row(0, 0)).item() == 0
    assert not preference_losses.kto_reference_point(policy, policy).requires_grad


def test_wrong_kto_is_refused() -> None:
    good = torch.tensor([True])
    with pytest.raises(ConfigError, match="beta=0"):
        kto(_row(0), _row(0), good, 0, beta=0)
    with pytest.raises(ConfigError, match="undesirable_weight=-1"):
        kto(_row(0), _row(0), good, 0, undesirable_weight=-1)
    with pytest.raises(DataError, match="differ in shape"):
        kto(_row(0, 1), _row(0), good, 0)


def test_bradley_terry_by_hand() -> None:
    chosen, rejected = _row(2.0, 0.0), _row(1.0, 1.0)
    assert bradley_terry(chosen, rejected).loss.tolist() == pytest.approx([_nls(1), _nls(-1)])
    out = bradley_terry(chosen, rejected, _row(0.5, 0), center_rewards_coefficient=0.1)
    assert out.loss.tolist() == pytest.approx([_nls(0.5) + 0.9, _nls(-1) + 0.1])
    assert compute_means(out.metrics)["rewards/accuracies"] == 0.5


def test_bradley_terry_gradient_and_refusals() -> None:
    scores = (_row(2.0, 0.0).requires_grad_(), _row(1.0, 1.5).requires_grad_())
    assert torch.autograd.gradcheck(
        lambda a, b: bradley_terry(a, b, _row(0.1, 0.2), center_rewards_coefficient=0.3).loss,
        scores,
    )
    with pytest.raises(ConfigError, match="center_rewards_coefficient=-1"):
        bradley_terry(*scores, center_rewards_coefficient=-1)
    with pytest.raises(DataError, match="differ in shape"):
        bradley_terry(*scores, _row(1.0))
