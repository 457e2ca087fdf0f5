"""Rounds of random plans, carried out in memory: bounded, agreed on by both ends, complete."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reshard_cases import Totals, cases, local_parts, numbered, view

from engine.errors import ConfigError
from engine.parallel.layout import Layout, RolloutLayout
from engine.parallel.reshard import AllToAll, Bucket, ReshardPlan, make_all_to_alls, plan_reshard
from engine.parallel.shard_maps import Box, Shard, ShardedParameter, ShardMap

SLOW = settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])


def rounds_of(planned: ReshardPlan, bucket_bytes: int) -> list[list[AllToAll]]:
    """Every rank's steps."""
    ranks = range(planned.target.world_size)
    return [list(make_all_to_alls(planned.for_rank(rank), bucket_bytes)) for rank in ranks]


@SLOW
@given(cases(), st.sampled_from([800, 5000, 1 << 20]))
def test_both_ends_cut_alike_and_no_bucket_is_too_large(
    case: tuple[Layout, RolloutLayout, ShardMap, ShardMap], bucket_bytes: int
) -> None:
    _, _, source, target = case
    everyone = rounds_of(plan_reshard(source, target), bucket_bytes)
    assert len({len(steps) for steps in everyone}) == 1  # all make as many all-to-alls
    for together in zip(*everyone, strict=True):
        assert len({one.dtype for one in together}) == 1
        for rank, one in enumerate(together):
            assert one.send.counts[rank] == 0
            for peer, other in enumerate(together):
                assert one.send.counts[peer] == other.receive.counts[rank]
            for bucket in (one.send, one.receive):
                assert bucket.elements * one.dtype.itemsize <= bucket_bytes
                check_pieces(bucket)


def check_pieces(bucket: Bucket) -> None:
    """Pieces fill the bucket from its start to its end, in order."""
    end = 0
    for part in bucket.slices:
        assert part.offset == end
        assert part.elements == Box(part.start, part.size).elements > 0
        end += part.elements
    assert end == bucket.elements


@SLOW
@given(cases(most=8), st.sampled_from([800, 5000]))
def test_what_is_packed_is_what_is_unpacked(
    case: tuple[Layout, RolloutLayout, ShardMap, ShardMap], bucket_bytes: int
) -> None:
    _, _, source, target = case
    planned = plan_reshard(source, target)
    whole = numbered(source.shapes)
    ranks = range(target.world_size)
    parts = [local_parts(source, whole, rank) for rank in ranks]
    wanted = [local_parts(target, whole, rank) for rank in ranks]
    storages = [planned.for_rank(rank).storages for rank in ranks]
    received = 0
    for together in zip(*rounds_of(planned, bucket_bytes), strict=True):
        for rank, one in enumerate(together):
            arrived = torch.cat(
                [torch.empty(0, dtype=torch.int64), *sent_to(rank, together, parts)]
            )
            received += len(arrived) * one.dtype.itemsize
            for part in one.receive.slices:
                storage = wanted[rank][storages[rank][part.parameter]]
                expected = view(storage, part.start, part.size).flatten()
                assert torch.equal(arrived[part.offset : part.offset + part.elements], expected)
    assert received == Totals(planned).received.sum()


def sent_to(
    rank: int, together: tuple[AllToAll, ...], parts: list[dict[str, torch.Tensor]]
) -> list[torch.Tensor]:
    """What an all-to-all brings to `rank`: each rank's run for it, by rank."""
    found = []
    for peer, one in enumerate(together):
        packed = torch.cat(
            [
                torch.empty(0, dtype=torch.int64),
                *(
                    view(parts[peer][p.parameter], p.start, p.size).flatten()
                    for p in one.send.slices
                ),
            ]
        )
        start = sum(one.send.counts[:rank])
        found.append(packed[start : start + one.send.counts[rank]])
    return found


def halves(dtype: torch.dtype, elements: int = 64) -> ReshardPlan:
    """Each of two ranks has half of a parameter and is to have all."""
    half = elements // 2
    source = tuple(Shard(Box((half * r,), (half,)), (0,), (r,)) for r in range(2))
    target = (Shard(Box((0,), (elements,)), (0,), (0, 1)),)
    shape = (elements,)
    return plan_reshard(
        ShardMap(2, {"w": ShardedParameter(shape, "w", source)}, {}),
        ShardMap(2, {"w": ShardedParameter(shape, "w", target)}, {"w": dtype}),
    )


def test_rounds_are_of_equal_size() -> None:
    """32 elements each way in buckets of 10, one of them spare: 4 steps of 8."""
    steps = list(make_all_to_alls(halves(torch.float32).for_rank(0), 10 * 4))
    assert [one.send.counts for one in steps] == [[0, 8]] * 4
    offsets = list(chain.from_iterable(p.start for one in steps for p in one.send.slices))
    assert offsets == [0, 8, 16, 24]


def test_buckets_without_room() -> None:
    with pytest.raises(ConfigError, match="buckets of 4 bytes are too small for 1 peers; raise"):
        list(make_all_to_alls(halves(torch.float32).for_rank(0), 4))


def test_nothing_to_move_is_no_rounds() -> None:
    planned = halves(torch.float32)
    same = plan_reshard(
        planned.source, ShardMap(2, planned.source.parameters, {"w": torch.float32})
    )
    assert rounds_of(same, 4) == [[], []]
