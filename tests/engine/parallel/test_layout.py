"""Layouts, boxes and the plan of resharding."""

from __future__ import annotations

import itertools
import pickle
import time
from collections import Counter
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
    local_parts,
    merge_stages,
    numbered,
    random_shards,
    renumber,
    shards_of_rank,
    subtract_all,
    training_shard_map,
    view,
)
from reshard_cases import layouts as reshard_layouts
from thorough import and_slow
from tiny_engine import tiny_model

from engine.config import ParallelConfig
from engine.errors import ConfigError, ModelError
from engine.parallel.layout import (
    AXES,
    Layout,
    ModelShape,
    RolloutLayout,
    check_layout,
    rollout_layout,
)
from engine.parallel.pipeline_parallel import split_layers
from engine.parallel.reshard import ReshardPlan, plan_reshard
from engine.parallel.shard_maps import (
    Box,
    Shard,
    ShardedParameter,
    ShardMap,
    chunk,
    disjoint_boxes,
    flat_range,
    rollout_shard_map,
)

sizes = st.integers(1, 4)


layouts = st.builds(Layout, pp=sizes, dp=sizes, fsdp=sizes, sp=sizes, tp=sizes)


@given(layouts)
def test_a_rank_and_its_coordinates_are_one_another_s_inverse(layout: Layout) -> None:
    for rank in range(layout.world_size):
        assert layout.index(layout.coordinates(rank), AXES) == rank


@given(layouts, st.sets(st.sampled_from(AXES)))
def test_groups_hold_every_rank_once(layout: Layout, axes: set[str]) -> None:
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        others = {
            tuple(layout.coordinates(rank)[axis] for axis in AXES if axis not in axes)
            for rank in group
        }
        assert len(others) == 1


def test_tp_ranks_are_neighbours() -> None:
    assert Layout(fsdp=2, tp=2).groups("tp") == [[0, 1], [2, 3]]
    assert Layout(fsdp=2, tp=2).groups("dp", "fsdp") == [[0, 2], [1, 3]]
    assert str(Layout(fsdp=2, tp=2)) == "fsdp=2 tp=2"
    assert str(Layout()) == "one rank"


def test_a_configuration_names_its_layout() -> None:
    assert Layout.of(ParallelConfig(dp=2, pp=3)) == Layout(dp=2, pp=3)
    assert Layout.of(ParallelConfig(dp=2, fsdp=2)).data_ranks == 4


def test_the_shape_of_a_model_is_read_from_its_configuration() -> None:
    shape = ModelShape.of(tiny_model("qwen2").config)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.layers) == (4, 2, 8, 2)
    with pytest.raises(ConfigError, match=r"gpt2.*use one rank"):
        ModelShape.of(tiny_model("gpt2").config)


@pytest.mark.parametrize(
    ("layout", "ranks", "message"),
    [
        (Layout(fsdp=2, tp=2), 2, "fsdp=2 tp=2 is one of 4 ranks, but there are 2"),
        (Layout(tp=3), 3, "tp=3 does not divide the model's num_attention_heads=4"),
        (Layout(sp=3), 3, r"sp=3 does not divide the model's num_attention_heads=4"),
        (Layout(pp=3), 3, "pp=3 stages are more than the model's 2 layers"),
    ],
)
def test_impossible_layouts_are_refused(layout: Layout, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(layout, ranks, ModelShape.of(tiny_model("qwen2").config))


SIDE = 6


def members(box: Box) -> set[tuple[int, ...]]:
    ranges = [range(a, a + n) for a, n in zip(box.offset, box.size, strict=True)]
    return set(itertools.product(*ranges))


@st.composite
def boxes(draw: st.DrawFn, dims: int = 2, least: int = 0) -> Box:
    offset = tuple(draw(st.integers(0, SIDE - 1)) for _ in range(dims))
    return Box(offset, tuple(draw(st.integers(least, SIDE - a)) for a in offset))


@given(boxes(dims=3), boxes(dims=3))
def test_intersection_and_difference_of_two_boxes(a: Box, b: Box) -> None:
    common = a.intersect(b)
    assert (members(common) if common else set()) == members(a) & members(b)
    counts = Counter(index for part in a.subtract(b) for index in members(part))
    assert set(counts) == members(a) - members(b)
    assert all(count == 1 for count in counts.values())


@given(boxes(), st.lists(boxes(), max_size=4))
def test_what_several_boxes_leave(box: Box, others: list[Box]) -> None:
    counts = Counter(index for part in subtract_all(box, others) for index in members(part))
    assert set(counts) == members(box).difference(*map(members, others))
    assert all(count == 1 for count in counts.values())


@given(st.lists(st.tuples(boxes(), st.sets(st.integers(0, 4), min_size=1)), max_size=6))
def test_tiles_give_each_element_once_with_all_its_holders(
    held: list[tuple[Box, set[int]]],
) -> None:
    expected: dict[tuple[int, ...], set[int]] = {}
    for box, ranks in held:
        for index in members(box):
            expected.setdefault(index, set()).update(ranks)
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for box, holders in disjoint_boxes(held):
        for index in members(box):
            assert index not in found
            found[index] = holders
    assert found == {index: tuple(sorted(ranks)) for index, ranks in expected.items()}


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.integers(0, 256), st.integers(0, 256))
def test_a_flat_run_walks_rows_in_order(size: tuple[int, ...], a: int, b: int) -> None:
    numbers = torch.arange(Box.whole(size).elements).view(size)
    start, stop = sorted((min(a, numbers.numel()), min(b, numbers.numel())))
    run = flat_range(size, start, stop)
    walked = [
        numbers[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))].flatten()
        for box in run
    ]
    assert torch.cat([*walked, numbers.new_empty(0)]).tolist() == list(range(start, stop))
    assert len(run) <= max(1, 2 * len(size) - 1)


@given(st.integers(1, 40), st.integers(1, 9), boxes())
def test_chunks_are_those_of_torch(rows: int, parts: int, other: Box) -> None:
    expected = [len(part) for part in torch.arange(rows).chunk(parts)]
    got = [chunk(Box((7, 0), (rows, 2)), 0, parts, i) for i in range(parts)]
    assert [box.size[0] for box in got] == expected + [0] * (parts - len(expected))
    assert [box.offset[0] for box in got if box.elements] == [
        7 + sum(expected[:i]) for i in range(len(expected))
    ]
    assert chunk(other, None, parts, 0) == other


def test_where_a_box_begins_in_a_storage() -> None:
    fused = Box((8, 0), (4, 16))  # rows 8 to 12 lie at row 100 of a storage
    assert Box((9, 2), (1, 3)).start_in(fused, (100, 0)) == (101, 2)


def test_a_scalar_is_one_element() -> None:
    scalar = Box.whole(())
    assert scalar.elements == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.subtract(scalar) == []
    assert disjoint_boxes([(scalar, [1]), (scalar, [0])]) == [(scalar, (0, 1))]


def test_boxes_of_different_dimensions_do_not_mix() -> None:
    with pytest.raises(ValueError, match="zip"):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))


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
@given(reshard_layouts(most=32), st.data())
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
    """A map of one parameter of 8 elements, from (offset, size, rank) of each part."""
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


SIZES = st.sampled_from([1, 2, 4])


@st.composite
def cases_rollout(draw: st.DrawFn) -> tuple[Layout, RolloutLayout]:
    layout = Layout(*(draw(SIZES) for _ in range(5)))
    pp = draw(st.sampled_from([n for n in (1, 2, 4) if layout.pp % n == 0]))
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if n <= layout.world_size // layout.pp]))
    return layout, rollout_layout(layout, pp, tp)


def copies(found: RolloutLayout) -> int:
    """Copies of the model in rollout."""
    return found.world_size // (found.pp * found.tp)


def test_the_paper_s_figure_8() -> None:
    """Train 1-4-2, generate 1-2-2-2: tensor parallel groups at regular intervals."""
    found = rollout_layout(Layout(dp=2, tp=4), tp=2)
    assert found.tp_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert (found.pp, found.tp, copies(found)) == (1, 2, 4)


def test_vllm_s_own_groups_are_neighbours() -> None:
    found = RolloutLayout((("dp", 2), ("pp", 2), ("tp", 2)))
    assert found.tp_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@given(cases_rollout())
def test_each_place_is_taken_once(case: tuple[Layout, RolloutLayout]) -> None:
    layout, found = case
    assert found.world_size == layout.world_size == found.pp * found.tp * copies(found)
    places = {found.place(rank) for rank in range(found.world_size)}
    assert len(places) == found.world_size
    for group in found.tp_groups():
        assert [found.place(rank).tp for rank in group] == list(range(found.tp))
    sizes = Counter(found.place(rank).data for rank in range(found.world_size))
    assert set(sizes.values()) == {found.pp * found.tp}


@given(cases_rollout())
def test_a_training_shard_nests_in_the_rollout_shard(case: tuple[Layout, RolloutLayout]) -> None:
    """It nests as fractions of stages and rows do; with a smaller tp the other way round."""
    layout, found = case
    shards = layout.fsdp * layout.sp
    for rank in range(layout.world_size):
        at, place = layout.coordinates(rank), found.place(rank)
        assert place.pp == at["pp"] * found.pp // layout.pp
        if found.tp <= layout.tp:
            assert place.tp == at["tp"] * found.tp // layout.tp
        elif found.tp <= layout.tp * shards:
            cut = at["tp"] * shards + at["fsdp"] * layout.sp + at["sp"]
            assert place.tp == cut * found.tp // (layout.tp * shards)
        else:  # copies of a shard are cut further
            assert place.tp * layout.tp // found.tp == at["tp"]


@given(cases_rollout())
def test_prompts_are_split_over_copies_of_the_model(case: tuple[Layout, RolloutLayout]) -> None:
    _, found = case
    shards = [found.data_shard(rank) for rank in range(found.world_size)]
    collecting = [rank for rank, shard in enumerate(shards) if shard.collects]
    assert sorted(found.place(rank).data for rank in collecting) == list(range(copies(found)))
    for rank, shard in enumerate(shards):
        assert (shard.index, shard.count) == (found.place(rank).data, copies(found))


@pytest.mark.parametrize(
    ("layout", "pp", "tp", "problem"),
    [
        (Layout(pp=4), 3, 1, "pp=3 stages can't be made of the trainer's 4"),
        (Layout(tp=4), 1, 3, "tp=3 can't be made of the trainer's tp=4"),
        (Layout(tp=2), 1, 4, "that times a divisor of dp · fsdp · sp = 1"),
        (Layout(pp=2, tp=2), 1, 4, "tp=4 can't be made"),
    ],
)
def test_sizes_that_do_not_nest(layout: Layout, pp: int, tp: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        rollout_layout(layout, pp, tp)
