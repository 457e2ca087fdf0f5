"""Entropy and sums of squared probabilities against the definitions."""

import math

import pytest
import torch

from engine.algorithms.divergences import entropy, sum_pi_squared


def test_by_hand() -> None:
    logits = torch.tensor([[1.0, 1.0, -torch.inf], [3.0, 3.0, 3.0]])
    assert entropy(logits).tolist() == pytest.approx([math.log(2), math.log(3)])
    assert sum_pi_squared(logits).tolist() == pytest.approx([1 / 2, 1 / 3])
    quarter = torch.tensor([[0.0, 2 * math.log(3)]])  # at temperature 2: 1/4 and 3/4
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropy(quarter, temperature=2.0).item() == pytest.approx(expected)
    assert sum_pi_squared(quarter, temperature=2.0).item() == pytest.approx(10 / 16)


@pytest.mark.parametrize("chunk", [1, 2, 50])
def test_gradient_is_exact_whatever_the_chunks(chunk: int) -> None:
    logits = torch.randn(
        2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: entropy(x, chunk_tokens=chunk), (logits,))
    reference = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy(logits, chunk_tokens=chunk), reference)


def test_impossible_and_masked_tokens_give_finite_gradients() -> None:
    logits = torch.tensor([[0.5, -torch.inf, 1.0], [torch.nan] * 3], requires_grad=True)
    got = entropy(logits, mask=torch.tensor([1, 0]))
    got.sum().backward()
    assert got[1] == 0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0] != 0
    assert (logits.grad[1] == 0).all()


def test_low_precision_is_computed_in_float32() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert entropy(logits).dtype == torch.float32
    torch.testing.assert_close(entropy(logits), entropy(logits.float()))
