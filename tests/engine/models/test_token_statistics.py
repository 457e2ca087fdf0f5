"""Entropy and sums of squared probabilities of logits against the definitions."""

import math

import pytest
import torch
from torch import Tensor

from engine.models.vocabulary_head import token_statistics


def statistics(logits: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
    targets = torch.zeros(len(logits), dtype=torch.long)
    return token_statistics(
        logits, targets, temperature, entropy=True, entropy_gradient=True, sum_pi_squared=True
    )


def test_by_hand() -> None:
    got = statistics(torch.tensor([[1.0, 1.0, -torch.inf], [3.0, 3.0, 3.0]]))
    assert got["entropy"].tolist() == pytest.approx([math.log(2), math.log(3)])
    assert got["sum_pi_squared"].tolist() == pytest.approx([1 / 2, 1 / 3])
    quarter = statistics(torch.tensor([[0.0, 2 * math.log(3)]]), 2.0)  # 1/4 and 3/4
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert quarter["entropy"].item() == pytest.approx(expected)
    assert quarter["sum_pi_squared"].item() == pytest.approx(10 / 16)


def test_gradient_is_exact() -> None:
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (got,) = torch.autograd.grad(statistics(logits)["entropy"].sum(), logits)
    exact = logits.detach().double().requires_grad_()
    entropy = torch.distributions.Categorical(logits=exact).entropy()
    (expected,) = torch.autograd.grad(entropy.sum(), exact)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


def test_impossible_tokens_give_finite_gradients() -> None:
    logits = torch.tensor([[0.5, -torch.inf, 1.0]], requires_grad=True)
    statistics(logits)["entropy"].sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0] != 0


def test_low_precision_is_computed_in_float32() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).bfloat16()
    got, expected = statistics(logits), statistics(logits.float())
    for name, value in got.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name])
