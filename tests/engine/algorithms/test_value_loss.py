"""The critic's loss by hand, its gradient, its mask and its invariance to cuts."""

import math

import pytest
import torch
from torch import Tensor

from engine.algorithms.aggregation import MODES, Denominators, aggregate, compute_means, merge
from engine.algorithms.critic_loss import value_loss
from engine.errors import ConfigError, DataError

NAN = math.nan
# Old value 0, range 0.5: inside; beyond and away from the return; beyond and towards it.
VALUES = [0.25, 1.0, 1.0, NAN]
RETURNS = [1.0, 0.0, 2.0, NAN]
OLD = [0.0, 0.0, 0.0, NAN]
MASK = torch.tensor([[1, 1, 1, 0]])


def _row(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_by_hand() -> None:
    values = _row(VALUES).requires_grad_()
    out = value_loss(values, _row(OLD), _row(RETURNS), MASK)
    # (0.25 − 1)², max(1, 0.25), max(1, 2.25): the last takes the clipped value, without gradient
    assert out.loss[0].tolist() == pytest.approx([0.75**2 / 2, 1 / 2, 1.5**2 / 2, 0])
    out.loss.sum().backward()
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([-0.75, 1, 0, 0])
    metrics = compute_means(out.metrics)
    assert metrics == {
        "vpred_mean": pytest.approx(0.75),
        "vf_clipfrac": pytest.approx(1 / 3),
    }


def test_without_a_range_nothing_is_clipped() -> None:
    out = value_loss(_row(VALUES), _row(OLD), _row(RETURNS), MASK, cliprange_value=None)
    assert out.loss[0].tolist() == pytest.approx([0.75**2 / 2, 1 / 2, 1 / 2, 0])
    assert "vf_clipfrac" not in out.metrics


def _random() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(6, 4, generator=g, dtype=torch.float64) for _ in range(3))
    return values, old, returns, torch.rand(6, 4, generator=g) < 0.7


def test_gradient_matches_finite_differences_and_flows_into_values_only() -> None:
    values, old, returns, mask = _random()
    old.requires_grad_()
    returns.requires_grad_()
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, mask).loss, (values,))
    value_loss(values, old, returns, mask).loss.sum().backward()
    assert old.grad is None
    assert returns.grad is None


@pytest.mark.parametrize("mode", MODES)
def test_any_cut_gives_the_same(mode: str) -> None:
    values, old, returns, mask = _random()
    whole = Denominators.from_mask(mask)

    def part(rows: slice) -> tuple[Tensor, Tensor, dict]:
        own = values[rows].clone().requires_grad_()
        out = value_loss(own, old[rows], returns[rows], mask[rows])
        loss = aggregate(out.loss, mask[rows], mode, whole)
        return loss.detach(), torch.autograd.grad(loss, own)[0], dict(out.metrics)

    loss, gradient, metrics = part(slice(0, 6))
    parts = [part(slice(0, 1)), part(slice(1, 4)), part(slice(4, 6))]
    torch.testing.assert_close(sum(x[0] for x in parts), loss)
    torch.testing.assert_close(torch.cat([x[1] for x in parts]), gradient)
    assert compute_means(merge(x[2] for x in parts)) == pytest.approx(compute_means(metrics))


def test_wrong_calls_are_refused() -> None:
    x = _row(RETURNS)
    with pytest.raises(ConfigError, match="cliprange_value=-1"):
        value_loss(x, x, x, MASK, cliprange_value=-1)
    with pytest.raises(DataError, match=r"old_values has shape \[1, 3\]"):
        value_loss(x, x[:, :3], x, MASK)
