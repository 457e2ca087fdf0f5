"""Gradients over ranks, and their buckets."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reshard_cases import Totals, cases, local_parts, numbered, view
from thorough import and_slow
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from engine.config import OptimConfig, ParallelConfig
from engine.errors import ConfigError
from engine.parallel import fsdp, gradients, shard_maps
from engine.parallel import module_shards as full
from engine.parallel.layout import DATA_AXES, Layout, RolloutLayout
from engine.parallel.module_shards import local_tensor
from engine.parallel.process_groups import Ranks
from engine.parallel.reshard import AllToAll, Bucket, ReshardPlan, make_all_to_alls, plan_reshard
from engine.parallel.shard_maps import Box, ShardedParameter, ShardMap
from engine.runtime.optimizer import Optimizer

SHAPES = [(7, 5), (3,), (5, 7), (1, 1), (40,), (2, 3)]


def parameters(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.zeros(shape, dtype=dtypes[i % len(dtypes)]))
        for i, shape in enumerate(SHAPES)
    ]


def sync_in_buckets(limit: int) -> None:
    """Rank r's gradients are (1 + r)·2^-4r; some ranks lack some, all lack the last but one."""
    ranks = Ranks.form(Layout(dp=4))
    trained = parameters((torch.float32, torch.bfloat16))
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    value = (1 + ranks.rank) * 2.0 ** (-4 * ranks.rank)
    for i, parameter in enumerate(trained):
        if i != 4 and (i + ranks.rank) % 3:
            parameter.grad = torch.full_like(parameter, value)
    trained[0].grad = torch.full((5, 7), value).t()  # not contiguous
    sizes: list[int] = []
    plain_all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return plain_all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        gradients.all_reduce_gradients(
            [trained[0], frozen, *trained[1:]], ranks, bucket_elements=limit
        )
    finally:
        dist.all_reduce = plain_all_reduce
    assert frozen.grad is None
    for i, parameter in enumerate(trained):
        holders = [r for r in range(4) if i == 0 or (i != 4 and (i + r) % 3)]
        if not holders:
            assert parameter.grad is None
            continue
        wanted = torch.tensor(sum((1 + r) * 2.0 ** (-4 * r) for r in holders)).to(parameter.dtype)
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, wanted.expand_as(parameter))
    total = sum(p.numel() for i, p in enumerate(trained) if i != 4)
    buckets = sizes[1:]  # the first is the agreement on which parameters have gradients
    assert sum(buckets) == total
    assert max(buckets) <= limit
    assert len(buckets) <= 2 * math.ceil(total / limit)


@pytest.mark.parametrize("limit", [1, 4, 36, 1 << 20])
def test_replicas_sum_in_bounded_buckets(limit: int) -> None:
    run_ranks(4, sync_in_buckets, limit)


def sync_where_fsdp_sums() -> None:
    for layout in (Layout(dp=2, fsdp=2), Layout(sp=4)):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.ones(2)
        gradients.all_reduce_gradients([parameter], Ranks.form(layout))
        assert torch.equal(parameter.grad, torch.ones(2))
    gradients.all_reduce_gradients([parameter], Ranks(Layout()))
    gradients.all_reduce_gradients([], Ranks.form(Layout(dp=4)))


def test_nothing_is_summed_twice() -> None:
    run_ranks(4, sync_where_fsdp_sums)


class Spread(nn.Module):
    """One parameter of every kind: cut by tp in rows or columns, replicated on tp, unknown to tp.

    FSDP shares them further, those cut in rows with _StridedShard, whose is_shard() is False.
    """

    def __init__(self, ranks: Ranks, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        plans: list[Placement | None] = [Shard(0), Shard(1), Replicate(), None]
        shapes = [(7, 6), (5, 8), (9,), (3, 2)]
        self.whole = {}
        for number, (plan, shape) in enumerate(zip(plans, shapes, strict=True)):
            value: Tensor = torch.randn(shape, generator=draw)
            self.whole[f"p{number}"] = torch.randn(shape, generator=draw)  # the gradient
            if plan is not None and ranks.size("tp") > 1:
                value = distribute_tensor(value, ranks.submesh("tp"), [plan], src_data_rank=None)
            self.register_parameter(f"p{number}", nn.Parameter(value))
        fsdp.shard_model(self, ranks, ParallelConfig(), layers=[])
        for name, parameter in self.named_parameters():
            part = full.shard_like(self.whole[name], parameter).clone()
            parameter.grad = like(part, parameter)

    def whole_gradients(self) -> list[Tensor]:
        return list(self.whole.values())


def like(part: Tensor, parameter: nn.Parameter) -> Tensor:
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def norms(layout: Layout) -> tuple[float, float, float, float]:
    """Norm, the expected one, norm without the parameter that is counted elsewhere, the same."""
    ranks = Ranks.form(layout)
    stage = ranks.index("pp")
    model = Spread(ranks, seed=stage)
    own = list(model.parameters())
    everything = [g for s in range(layout.pp) for g in stage_gradients(s)]
    expected = float(torch.cat([g.double().flatten() for g in everything]).norm())
    norm = gradients.global_grad_norm(own, ranks)
    if layout.pp == 1:
        return norm, expected, norm, expected
    last = stage == layout.pp - 1
    once = gradients.global_grad_norm(own, ranks, {own[1]} if last else set())
    less = math.sqrt(expected**2 - float(stage_gradients(layout.pp - 1)[1].double().norm()) ** 2)
    return norm, expected, once, less


def stage_gradients(stage: int) -> list[Tensor]:
    return Spread(Ranks(Layout()), seed=stage).whole_gradients()


LAYOUTS = [
    Layout(dp=2, fsdp=2),
    Layout(fsdp=2, tp=2),
    Layout(fsdp=2, sp=2),
    Layout(dp=2, tp=2),
    Layout(pp=2, tp=2),
    Layout(pp=2, fsdp=2),
]


MORE = [Layout(sp=2, tp=2), Layout(pp=4), Layout(tp=4)]


@pytest.mark.parametrize("layout", and_slow(LAYOUTS, MORE), ids=str)
def test_norm_counts_every_element_once(layout: Layout) -> None:
    results = run_ranks(4, norms, layout)
    assert len(set(results)) == 1  # the same bits everywhere
    norm, expected, once, less = results[0]
    assert norm == pytest.approx(expected, rel=1e-6)
    assert once == pytest.approx(less, rel=1e-6)


def clipped(layout: Layout) -> None:
    ranks = Ranks.form(layout)
    for max_norm in (0.5, 1e6):
        model = Spread(ranks, seed=0)
        alone = [nn.Parameter(torch.zeros_like(g)) for g in model.whole_gradients()]
        for parameter, grad in zip(alone, model.whole_gradients(), strict=True):
            parameter.grad = grad.clone()
        wanted = float(nn.utils.clip_grad_norm_(alone, max_norm))
        assert gradients.clip_grad_norm(model.parameters(), ranks, max_norm) == pytest.approx(
            wanted
        )
        for parameter, theirs in zip(model.parameters(), alone, strict=True):
            assert parameter.grad is not None
            assert theirs.grad is not None
            part = full.shard_like(theirs.grad, parameter)
            torch.testing.assert_close(local_tensor(parameter.grad), part)
    bad = math.nan if ranks.rank == 0 else 1.0
    model = Spread(ranks, seed=0)
    before = [local_tensor(p.grad).clone() for p in model.parameters() if p.grad is not None]
    local_tensor(next(model.parameters()).grad)[:1] *= bad  # type: ignore[arg-type]
    assert not math.isfinite(
        gradients.clip_grad_norm(model.parameters(), ranks, 0.5)
    )  # on all ranks
    for parameter, old in zip(list(model.parameters())[1:], before[1:], strict=True):
        assert parameter.grad is not None
        assert torch.equal(local_tensor(parameter.grad), old)


@pytest.mark.parametrize("layout", [Layout(fsdp=2, tp=2), Layout(pp=2, tp=2)], ids=str)
def test_clip_scales_as_torch_does(layout: Layout) -> None:
    # Stages with equal gradients: their norm is another, so only tp and fsdp are compared.
    run_ranks(4, clipped, layout if layout.pp == 1 else Layout(dp=2, tp=2))


def partial_sums() -> None:
    ranks = Ranks.form(Layout(tp=2))
    mesh = ranks.submesh("tp")
    parameter = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(
        torch.full((3,), 1.0 + ranks.rank), mesh, [Partial()], run_check=False
    )
    assert gradients.global_grad_norm([parameter], ranks) == pytest.approx(3 * math.sqrt(3))
    assert isinstance(parameter.grad, DTensor)
    assert parameter.grad.placements == (Replicate(),)
    assert torch.equal(parameter.grad.to_local(), torch.full((3,), 3.0))


def test_partial_sums_of_tensor_parallelism_are_added_up() -> None:
    run_ranks(2, partial_sums)


def test_one_rank_has_the_plain_norm() -> None:
    alone, theirs = parameters((torch.float32, torch.bfloat16)), parameters()
    for i, (mine, other) in enumerate(zip(alone, theirs, strict=True)):
        mine.grad = torch.full_like(mine, 2.0 ** -(i % 3))
        other.grad = mine.grad.float().clone()
    expected = float(nn.utils.clip_grad_norm_(theirs, 1.0))
    assert gradients.clip_grad_norm(alone, Ranks(Layout()), 1.0) == pytest.approx(expected)
    for mine, other in zip(alone, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(mine.grad.float(), other.grad, rtol=0.01, atol=0)
    assert gradients.global_grad_norm([], Ranks(Layout())) == 0.0


class Block(nn.Module):
    """Norm, up, down: on tp ranks the norm sees shares of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def train_blocks(layout: Layout) -> tuple[list[float], dict[str, Tensor]]:
    ranks = Ranks.form(layout)
    torch.manual_seed(0)
    model = Blocks()
    if ranks.size("tp") > 1:
        plan: dict[str, Any] = {
            "": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
            ),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
        for layer in model.layers:
            parallelize_module(layer, ranks.submesh("tp"), plan)
    fsdp.shard_model(model, ranks, ParallelConfig(), layers=list(model.layers))
    optimizer = Optimizer(model, OptimConfig(lr=0.02, grad_clip=0.5), 2, ranks)
    found, axes = [], (*DATA_AXES, "sp")
    for step in range(2):
        x = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(step))
        mine = x[ranks.index(*axes) :: ranks.size(*axes)]
        for rows in mine.split(1):  # accumulated partial sums stay partial
            (model(rows).square().sum() / 100).backward()
        gradients.all_reduce_gradients(model.parameters(), ranks)
        found.append(optimizer.step())
    return found, {n: w.clone() for n, w in full.gather_full_tensors(model, ranks)}


def blocks_train_as_alone(layout: Layout) -> None:
    got, wanted = train_blocks(layout), train_blocks(Layout())
    assert got[0] == pytest.approx(wanted[0], rel=2e-6)
    torch.testing.assert_close(got[1], wanted[1], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("layout", [Layout(fsdp=2, tp=2), Layout(dp=2, tp=2)], ids=str)
def test_training_on_two_meshes_equals_one_ranks(layout: Layout) -> None:
    run_ranks(4, blocks_train_as_alone, layout)


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
    source = tuple(shard_maps.Shard(Box((half * r,), (half,)), (0,), (r,)) for r in range(2))
    target = (shard_maps.Shard(Box((0,), (elements,)), (0,), (0, 1)),)
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
