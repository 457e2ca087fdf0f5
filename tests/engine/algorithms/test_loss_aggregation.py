"""Aggregation modes by hand, denominators over parts, empty masks, metrics as sums."""

import pytest
import torch

from engine.algorithms import aggregation
from engine.algorithms.aggregation import MODES, Denominators, aggregate
from engine.errors import ConfigError, DataError

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, torch.nan, 6.0], [torch.nan] * 3])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 5),
        ("token-sum", 16.0),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 3),
        ("seq-mean-token-mean", (2 + 5) / 2),
    ],
)
def test_modes_by_hand(mode: str, expected: float) -> None:
    whole = Denominators.from_mask(MASK)
    assert aggregate(LOSS, MASK, mode, whole).item() == pytest.approx(expected)


def test_norm_with_a_scale() -> None:
    got = aggregate(
        LOSS, MASK, "seq-mean-token-sum-norm", Denominators.from_mask(MASK), scale_factor=4.0
    )
    assert got.item() == pytest.approx(16 / 2 / 4)


def test_all_modes_are_covered_above() -> None:
    assert set(MODES) == {
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "seq-mean-token-mean",
    }


def test_denominators_skip_fully_masked_rows_and_add_up() -> None:
    whole = Denominators.from_mask(MASK)
    assert (whole.tokens, whole.sequences, whole.width) == (5, 2, 3)
    assert Denominators.from_mask(MASK[:1]) + Denominators.from_mask(MASK[1:]) == whole


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_is_zero_with_zero_gradient(mode: str) -> None:
    x = torch.full((2, 3), torch.nan, requires_grad=True)
    mask = torch.zeros(2, 3)
    loss = aggregate(x, mask, mode, Denominators.from_mask(mask))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(x.grad, torch.zeros(2, 3))


def test_errors_name_the_way_out() -> None:
    whole = Denominators.from_mask(MASK)
    with pytest.raises(ConfigError, match=r"loss_agg_mode='mean' is unknown; use"):
        aggregate(LOSS, MASK, "mean", whole)
    with pytest.raises(ConfigError, match="loss_scale_factor=0"):
        aggregate(LOSS, MASK, "seq-mean-token-sum-norm", whole, scale_factor=0)
    with pytest.raises(DataError, match="differ in shape"):
        aggregate(LOSS, MASK[:, :2], "token-mean", whole)
    with pytest.raises(DataError, match="whole global batch"):
        aggregate(LOSS, MASK, "token-mean", Denominators.from_mask(MASK * 0))


def test_metrics_merge_over_parts_and_ranks() -> None:
    parts = [
        {"kl": aggregation.accumulate_mean(LOSS[i : i + 1], MASK[i : i + 1])} for i in range(3)
    ]
    parts[0]["only"] = aggregation.MeanAccumulator(torch.tensor(6.0), torch.tensor(4.0))
    merged = aggregation.merge(parts)
    assert aggregation.compute_means(merged) == {"kl": pytest.approx(16 / 5), "only": 1.5}
    twice = aggregation.merge([merged, merged])  # two ranks with equal parts: means stay
    assert aggregation.compute_means(twice) == aggregation.compute_means(merged)


def test_a_metric_of_nothing_is_zero() -> None:
    assert aggregation.compute_means({"kl": aggregation.accumulate_mean(LOSS, MASK * 0)}) == {
        "kl": 0.0
    }
