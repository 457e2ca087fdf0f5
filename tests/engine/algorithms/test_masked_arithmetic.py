"""Masked sums, whitening, reward-to-go and group statistics against plain Python."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithms import masked
from engine.algorithms.masked import Groups

NAN = math.nan


def test_mean_ignores_garbage_outside_the_mask() -> None:
    x = torch.tensor([[1.0, NAN, 3.0], [math.inf, 5.0, -math.inf]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    assert masked.masked_mean(x, mask) == 3.0
    assert masked.masked_mean(x, mask, 1).tolist() == [2.0, 5.0]
    assert masked.masked_sum(x, mask).item() == 9.0


def test_gradient_outside_the_mask_is_zero_even_for_nan() -> None:
    x = torch.tensor([[1.0, NAN], [2.0, 4.0]], requires_grad=True)
    masked.masked_whiten(x, torch.tensor([[1, 0], [1, 1]]))[0, 0].backward()
    assert x.grad is not None
    assert x.grad[0, 1] == 0
    assert x.grad.isfinite().all()
    assert x.grad[0, 0] != 0


def test_empty_mask_gives_zeros() -> None:
    x, mask = torch.full((2, 3), NAN), torch.zeros(2, 3)
    assert masked.masked_mean(x, mask) == 0
    assert masked.masked_mean(x, mask, 1).tolist() == [0, 0]
    assert torch.equal(masked.masked_whiten(x, mask), torch.zeros(2, 3))
    assert torch.equal(masked.reward_to_go(x, mask), torch.zeros(2, 3))


def test_whiten_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    # mean 3, variance (4 + 1 + 9)/2 = 7
    expected = [[-2 / math.sqrt(7), -1 / math.sqrt(7), 0], [3 / math.sqrt(7), 0, 0]]
    got = masked.masked_whiten(x, mask)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=0)
    unshifted = masked.masked_whiten(x, mask, shift_mean=False)
    torch.testing.assert_close(unshifted[0, 0].item(), 3 - 2 / math.sqrt(7), rtol=1e-8, atol=0)
    assert unshifted[1, 2] == 0


def test_whiten_of_a_single_entry_is_zero() -> None:
    got = masked.masked_whiten(torch.tensor([[5.0, 1.0]]), torch.tensor([[1, 0]]))
    assert got.tolist() == [[0.0, 0.0]]


def test_reward_to_go_jumps_over_a_tool_turn() -> None:
    rewards = torch.tensor([[1.0, 2.0, 9.0, 4.0, 9.0]])
    mask = torch.tensor([[1, 1, 0, 1, 0]])
    # from the right: 4, (carried 4), 2 + 4/2 = 4, 1 + 4/2 = 3; the tail has nothing after it
    assert masked.reward_to_go(rewards, mask, 0.5).tolist() == [[3.0, 4.0, 4.0, 4.0, 0.0]]


def test_reward_to_go_of_no_columns() -> None:
    assert masked.reward_to_go(torch.zeros(2, 0), torch.zeros(2, 0)).shape == (2, 0)


def test_group_statistics_by_hand() -> None:
    groups = Groups.of(torch.tensor([9, 4, 9, 4, 9, 1]))
    x = torch.tensor([1.0, 5.0, 2.0, 7.0, 6.0, 3.0], dtype=torch.float64)
    assert groups.size.tolist() == [1, 2, 3]
    assert groups.mean(x)[groups.index].tolist() == pytest.approx([3, 6, 3, 6, 3, 3])
    assert groups.std(x).tolist() == pytest.approx([0, math.sqrt(2), math.sqrt(7)])
    assert groups.max(x).tolist() == [3, 7, 6]
    assert groups.range(x).tolist() == [0, 2, 5]


def test_rows_left_out_have_no_say() -> None:
    groups = Groups.of(torch.tensor([0, 0, 0, 1]), torch.tensor([True, True, False, False]))
    x = torch.tensor([1.0, 3.0, NAN, math.inf])
    assert groups.size.tolist() == [2, 0]
    assert groups.mean(x).tolist() == [2.0, 0.0]
    assert groups.std(x).tolist() == [pytest.approx(math.sqrt(2)), 0.0]
    assert groups.max(x).tolist() == [3.0, 0.0]
    assert groups.sum(torch.stack([x, x], 1)).tolist() == [[4.0, 4.0], [0.0, 0.0]]


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.floats(-100, 100, width=32)), min_size=1, max_size=12)
)
def test_group_statistics_agree_with_the_statistics_module(rows: list[tuple[int, float]]) -> None:
    ids = torch.tensor([group for group, _ in rows])
    x = torch.tensor([value for _, value in rows], dtype=torch.float64)
    groups = Groups.of(ids)
    means, stds = groups.mean(x)[groups.index], groups.std(x)[groups.index]
    for row, (group, _) in enumerate(rows):
        values = [value for other, value in rows if other == group]
        assert means[row].item() == pytest.approx(statistics.fmean(values), abs=1e-9)
        expected = statistics.stdev(values) if len(values) > 1 else 0.0
        assert stds[row].item() == pytest.approx(expected, abs=1e-6)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9))
def test_the_mean_of_equal_rows_is_exact(value: float, count: int) -> None:
    groups = Groups.of(torch.zeros(count, dtype=torch.long))
    x = torch.full((count,), value, dtype=torch.float32)
    assert groups.mean(x).item() == x[0].item()
    assert groups.std(x).item() == 0.0
