"""Splitting, padding and merging of rows and metrics, without any process."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch
from engine.controller.worker_host import (
    RankMetrics,
    drop_padding,
    merge_results,
    reduce_metrics,
    shard_rows,
)
from engine.errors import DataError, WorkerError
from engine.parallel.layout import Layout
from engine.workers.role import Metric


def batch(rows: int) -> Batch:
    tensors = {"x": torch.arange(rows), "response_mask": torch.ones(rows, 2)}
    return Batch(tensors, {"tag": list(range(rows))})


@given(rows=st.integers(1, 17), ranks=st.integers(1, 6), repeat=st.integers(1, 3))
def test_padded_shares_are_equal_and_join_to_the_whole(rows: int, ranks: int, repeat: int) -> None:
    layout = Layout(dp=ranks)
    parts = []
    for rank in range(ranks):
        part, real = shard_rows(batch(rows), layout.data_shard(rank), pad=True)
        assert len(part) == math.ceil(rows / ranks)
        assert part["response_mask"].sum() == 2 * real
        result = part.rows(torch.arange(len(part)).repeat_interleave(repeat))
        parts.append(drop_padding(result, len(part), real))
    whole = merge_results(parts)
    assert whole["x"].tolist() == [row for row in range(rows) for _ in range(repeat)]
    assert whole.columns["tag"].tolist() == whole["x"].tolist()
    assert whole["response_mask"].min() == 1


@given(rows=st.integers(1, 17), ranks=st.integers(1, 6))
def test_shares_without_padding_differ_by_one_row(rows: int, ranks: int) -> None:
    layout = Layout(dp=ranks)
    if rows < ranks:
        with pytest.raises(DataError, match="use more rows or fewer ranks"):
            shard_rows(batch(rows), layout.data_shard(0))
        return
    parts = [shard_rows(batch(rows), layout.data_shard(rank)) for rank in range(ranks)]
    assert all(len(part) == real for part, real in parts)
    assert {len(part) for part, _ in parts} <= {rows // ranks, -(-rows // ranks)}
    assert merge_results([part for part, _ in parts])["x"].tolist() == list(range(rows))


@given(
    units=st.integers(1, 17),
    unit=st.integers(1, 3),
    ranks=st.integers(1, 6),
    pad=st.booleans(),
)
def test_units_of_rows_stay_together(units: int, unit: int, ranks: int, pad: bool) -> None:
    layout, whole = Layout(dp=ranks), batch(units * unit)
    if units < ranks and not pad:
        with pytest.raises(DataError, match="use more rows or fewer ranks"):
            shard_rows(whole, layout.data_shard(0), unit=unit)
        return
    shares = [
        shard_rows(whole, layout.data_shard(rank), unit=unit, pad=pad) for rank in range(ranks)
    ]
    for part, real in shares:
        assert real % unit == 0
        runs = part["x"].view(-1, unit)
        assert torch.equal(runs, runs[:, :1] // unit * unit + torch.arange(unit))
        assert part["response_mask"].sum(1).tolist() == [2.0] * real + [0.0] * (len(part) - real)
    sizes = {len(part) // unit for part, _ in shares}
    assert sizes <= ({-(-units // ranks)} if pad else {units // ranks, -(-units // ranks)})
    kept = [drop_padding(part, len(part), real) for part, real in shares]
    assert merge_results(kept)["x"].tolist() == list(range(units * unit))


def test_three_pairs_on_two_ranks() -> None:
    layout = Layout(dp=2)
    shares = [shard_rows(batch(6), layout.data_shard(rank), unit=2, pad=True) for rank in range(2)]
    assert [(part["x"].tolist(), real) for part, real in shares] == [
        ([0, 1, 2, 3], 4),
        ([4, 5, 0, 1], 2),
    ]


def test_half_a_pair() -> None:
    with pytest.raises(DataError, match="3 rows make no whole units of 2"):
        shard_rows(batch(3), Layout(dp=1).data_shard(0), unit=2)


def test_the_batch_that_is_padded_stays_as_it_was() -> None:
    whole = batch(3)
    shard_rows(whole, Layout(dp=2).data_shard(1), pad=True)
    assert whole["response_mask"].min() == 1


@pytest.mark.parametrize("result", [{"x": 1.0}, batch(3)])
def test_padding_that_can_t_be_told_apart(result: object) -> None:
    with pytest.raises(WorkerError, match="padding can't be told apart"):
        drop_padding(result, 2, 1)


@given(
    parts=st.lists(
        st.tuples(st.integers(1, 9), st.floats(-10, 10), st.floats(0.5, 10)), min_size=1, max_size=5
    )
)
def test_reductions(parts: list[tuple[int, float, float]]) -> None:
    ranks = [
        RankMetrics(
            rows,
            {
                "rows": value,
                "weighted": Metric(value, weight=weight),
                "sum": Metric(value, "sum"),
                "max": Metric(value, "max"),
                "min": Metric(value, "min"),
            },
        )
        for rows, value, weight in parts
    ]
    got = reduce_metrics(ranks)
    values = [value for _, value, _ in parts]
    total, weight = sum(r for r, _, _ in parts), sum(w for _, _, w in parts)
    assert got["rows"] == pytest.approx(sum(r * v for r, v, _ in parts) / total, abs=1e-9)
    assert got["weighted"] == pytest.approx(sum(w * v for _, v, w in parts) / weight, abs=1e-9)
    assert (got["sum"], got["max"], got["min"]) == (sum(values), max(values), min(values))
    assert all(isinstance(value, float) for value in got.values())


def test_values_without_weight_are_left_out() -> None:
    parts = [{"a": Metric(math.nan, weight=0.0)}, {"a": Metric(2.0, weight=3.0)}]
    assert reduce_metrics([RankMetrics(1, part) for part in parts]) == {"a": 2.0}
    nothing = [RankMetrics(1, {"a": Metric(v, weight=0.0)}) for v in (1.0, 3.0)]
    assert reduce_metrics(nothing) == {"a": 2.0}


def test_ranks_must_agree_on_a_reduction() -> None:
    ranks = [RankMetrics(1, {"a": Metric(1.0, "max")}), RankMetrics(1, {"a": 1.0})]
    with pytest.raises(WorkerError, match=r"'a' is merged as \['max', 'mean'\]"):
        reduce_metrics(ranks)


def test_joining_other_results() -> None:
    assert merge_results([None, None]) is None
    assert merge_results(["alone"]) == "alone"
    with pytest.raises(WorkerError, match=r"\['float', 'str'\] can't be merged"):
        merge_results([1.0, "a"])


def test_ranks_that_differ_in_dp_get_rows_of_their_own() -> None:
    layout = Layout(pp=2, dp=3, tp=2)
    shards = [layout.data_shard(rank) for rank in range(12)]
    assert [s.index for s in shards] == [0, 0, 1, 1, 2, 2] * 2
    assert {s.count for s in shards} == {3}
    assert [r for r, s in enumerate(shards) if s.collects] == [0, 2, 4]
