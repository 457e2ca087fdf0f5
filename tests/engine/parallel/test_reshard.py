"""The plan's promises over random layouts, sizes and groupings, and HybridFlow's formula."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reshard_cases import (
    Totals,
    carry_out,
    cases,
    contiguous,
    decoder_shapes,
    layouts,
    local_parts,
    merge_stages,
    numbered,
    random_shards,
    renumber,
    shards_of_rank,
    training_shard_map,
    view,
)
from thorough import and_slow

from engine.errors import ConfigError, ModelError
from engine.parallel.layout import Layout, ModelShape, RolloutLayout, rollout_layout
from engine.parallel.pipeline_parallel import split_layers
from engine.parallel.reshard import ReshardPlan, plan_reshard
from engine.parallel.shard_maps import Box, Shard, ShardedParameter, ShardMap, rollout_shard_map

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TINY = ModelShape(4, 8, 4, 4, 32, 64, 128)


def check(planned: ReshardPlan) -> None:
    """Carry the plan out and compare every element; count bytes from the elements themselves."""
    ranks = range(planned.target.world_size)
    whole = numbered(planned.source.shapes)
    source = [local_parts(planned.source, whole, rank) for rank in ranks]
    target, written = carry_out(planned, source)
    lacking = np.zeros(len(ranks), np.int64)
    wanted = np.zeros(len(ranks), np.int64)
    for rank in ranks:
        owned = {name: torch.zeros(t.shape, dtype=torch.bool) for name, t in whole.items()}
        for name, _, shard in shards_of_rank(planned.source, rank):
            view(owned[name], shard.box.offset, shard.box.size).fill_(True)
        for name, storage, shard in shards_of_rank(planned.target, rank):
            expected = view(whole[name], shard.box.offset, shard.box.size)
            assert torch.equal(view(target[rank][storage], shard.start, shard.box.size), expected)
            size = planned.target.dtypes[name].itemsize
            wanted[rank] += size * shard.box.elements
            have = view(owned[name], shard.box.offset, shard.box.size)
            lacking[rank] += size * int((~have).sum())
        assert all(int(count.max()) <= 1 for count in written[rank].values())
    totals = Totals(planned)
    assert totals.received.tolist() == lacking.tolist() == totals.lower_bound.tolist()
    assert (totals.kept + totals.received).tolist() == wanted.tolist()
    assert totals.sent.sum() == totals.received.sum()


@SLOW
@given(cases(), st.sampled_from([None, 2, 4]))
def test_random_layouts(
    case: tuple[Layout, RolloutLayout, ShardMap, ShardMap], host_size: int | None
) -> None:
    _, _, source, target = case
    hosts = tuple(str(rank // host_size) for rank in range(source.world_size)) if host_size else ()
    check(plan_reshard(replace(source, hosts=hosts), target))


@SLOW
@given(st.data())
def test_random_boxes_that_overlap_anyhow(data: st.DataObject) -> None:
    ranks, shape = 4, data.draw(st.sampled_from([(), (7,), (4, 5), (3, 2, 4)]))
    dtypes = {"w": torch.bfloat16}
    source = ShardMap(ranks, {"w": data.draw(random_shards(shape, ranks, whole=True))}, dtypes)
    target = ShardMap(ranks, {"w": data.draw(random_shards(shape, ranks, whole=False))}, dtypes)
    check(plan_reshard(source, target))


def between(
    layout: Layout, groups: RolloutLayout, model: ModelShape = TINY, shapes: dict | None = None
) -> ReshardPlan:
    stages = split_layers(model.layers, layout.pp)
    source = training_shard_map(shapes or decoder_shapes(model), layout, model, stages)
    rollout_stages = merge_stages(stages, groups.pp)
    return plan_reshard(
        source, rollout_shard_map(source.shapes, groups, model, torch.bfloat16, rollout_stages)
    )


@SLOW
@given(layouts(most=32), st.data())
def test_traffic_is_hybridflow_s_formula_and_nothing_is_held_twice(
    layout: Layout, data: st.DataObject
) -> None:
    """(t·p - t_g·p_g) / (t_g·p_g·t·p) of the layers' matrices, on every rank (table 2)."""
    layout = Layout(pp=layout.pp, dp=layout.dp, tp=layout.tp)
    p, t = layout.pp, layout.tp
    p_g = data.draw(st.sampled_from([n for n in (1, 2, 4) if p % n == 0]))
    t_g = data.draw(st.sampled_from([n for n in (1, 2, 4) if t % n == 0]))
    matrices = {n: s for n, s in decoder_shapes(TINY).items() if "proj" in n}
    planned = between(layout, rollout_layout(layout, p_g, t_g), shapes=matrices)
    totals = Totals(planned)
    share = totals.model_bytes * (t * p - t_g * p_g)
    assert (totals.received * (t_g * p_g * t * p) == share).all()
    own = totals.model_bytes // (t * p)  # all of the training shard is part of the rollout shard
    assert (totals.kept == own).all()
    assert totals.sent.max() == totals.sent.min()


@pytest.mark.parametrize(
    ("layout", "groups", "share"),
    [
        (Layout(tp=4), rollout_layout(Layout(tp=4), 1, 2), [0.25] * 4),
        (Layout(tp=4), contiguous(4, 1, 2), [0.25, 0.5, 0.5, 0.25]),
        (Layout(dp=2, tp=2), rollout_layout(Layout(dp=2, tp=2), 1, 1), [0.5] * 4),
        (Layout(dp=2, tp=2), rollout_layout(Layout(dp=2, tp=2), 1, 2), [0.0] * 4),
        (Layout(fsdp=2, tp=2), rollout_layout(Layout(fsdp=2, tp=2), 1, 2), [0.25] * 4),
        (Layout(fsdp=4), contiguous(4), [0.75] * 4),
    ],
)
def test_the_share_of_a_model_that_each_rank_gets(
    layout: Layout, groups: RolloutLayout, share: list[float]
) -> None:
    planned = between(layout, groups)
    # Norms are whole on every rank that shares matrices: a little less or more than the share.
    totals = Totals(planned)
    assert (totals.received / totals.model_bytes).tolist() == pytest.approx(share, abs=0.003)


def test_senders_share_the_load() -> None:
    """Four ranks with the whole model feed four with none: one copy each."""
    shapes = decoder_shapes(TINY)
    source = renumber(training_shard_map(shapes, Layout(dp=4), TINY), [0, 1, 2, 3], 8)
    target = renumber(
        rollout_shard_map(shapes, contiguous(4), TINY, torch.bfloat16), [4, 5, 6, 7], 8
    )
    planned = plan_reshard(source, target)
    check(planned)
    totals = Totals(planned)
    assert totals.received.tolist() == [0] * 4 + [totals.model_bytes] * 4
    assert totals.sent.tolist() == [totals.model_bytes] * 4 + [0] * 4


def test_holders_take_turns_over_alike_layers() -> None:
    """One rank that lacks all: each holder sends a part, though every layer is planned alike."""
    shapes = {f"model.layers.{n}.self_attn.q_proj.weight": (32, 32) for n in range(4)}
    source = renumber(training_shard_map(shapes, Layout(dp=4), TINY), [0, 1, 2, 3], 5)
    target = renumber(rollout_shard_map(shapes, contiguous(1), TINY, torch.bfloat16), [4], 5)
    assert Totals(plan_reshard(source, target)).sent.tolist() == [2048] * 4 + [0]


def test_ranks_of_a_host_send_to_each_other_first() -> None:
    layout = Layout(dp=2, tp=4)  # two hosts of four, each with a copy of the model
    groups = rollout_layout(layout, 1, 2)
    stages = split_layers(TINY.layers, 1)
    source = training_shard_map(decoder_shapes(TINY), layout, TINY, stages)
    target = rollout_shard_map(source.shapes, groups, TINY, torch.bfloat16, stages)
    planned = plan_reshard(replace(source, hosts=tuple("aaaabbbb")), target)
    for rank in range(8):
        peers = {one.peer // 4 for one in planned.for_rank(rank).receives}
        assert peers == {rank // 4}


def test_a_plan_is_the_same_every_time_and_can_be_sent() -> None:
    layout = Layout(dp=2, fsdp=2, tp=2)
    first, second = (between(layout, rollout_layout(layout, 1, 1)) for _ in range(2))
    for rank in range(8):
        assert first.for_rank(rank) == second.for_rank(rank)
        assert pickle.loads(pickle.dumps(first.for_rank(rank))) == first.for_rank(rank)


@pytest.mark.parametrize(
    "layout", and_slow([Layout(pp=8, dp=16, tp=8)], [Layout(fsdp=1024)]), ids=str
)
def test_a_70b_model_on_1024_ranks_is_planned_in_seconds(layout: Layout) -> None:
    model = ModelShape(80, 64, 8, 128, 8192, 28672, 128256)
    started = time.perf_counter()
    planned = between(layout, rollout_layout(layout, 1, 8), model)
    totals = Totals(planned)
    assert (totals.received == totals.lower_bound).all()
    assert len(planned.for_rank(1023).receives) > 500
    assert time.perf_counter() - started < 60


def spread(*shard_map: tuple[int, int, int]) -> ShardMap:
    """Of one parameter of 8 elements: (offset, size, rank)."""
    parts = tuple(Shard(Box((a,), (n,)), (0,), (rank,)) for a, n, rank in shard_map)
    return ShardMap(2, {"w": ShardedParameter((8,), "w", parts)}, {"w": torch.float32})


def test_what_nobody_holds() -> None:
    with pytest.raises(ModelError, match="no rank holds 2 of the 8 elements of 'w' that rollout"):
        plan_reshard(spread((0, 6, 0)), spread((0, 8, 1)))


def test_another_model() -> None:
    other = ShardMap(2, {"w": ShardedParameter((9,), "w", ())}, {"w": torch.float32})
    with pytest.raises(ModelError, match=r"wants 'w' \[8\], but the trainer holds \[9\]"):
        plan_reshard(other, spread((0, 8, 1)))
    with pytest.raises(ModelError, match=r"wants 'w' \[8\], but the trainer has no such parameter"):
        plan_reshard(ShardMap(2, {}, {}), spread((0, 8, 1)))


def test_one_element_in_two_places_of_a_rank() -> None:
    with pytest.raises(ConfigError, match="rank 1 wants elements of 'w' in two places"):
        plan_reshard(spread((0, 8, 0)), spread((0, 8, 1), (4, 2, 1)))


def test_other_numbers_of_ranks() -> None:
    one = ShardMap(1, {}, {})
    with pytest.raises(ConfigError, match="is of 1 ranks, rollout's of 2"):
        plan_reshard(one, spread((0, 8, 1)))
    with pytest.raises(ConfigError, match="rank 1 holds parameters, but there are 1 ranks"):
        ShardMap(1, spread((0, 8, 1)).parameters, {})
