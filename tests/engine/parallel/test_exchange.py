"""Live training layouts on gloo ranks, resharded into rollout's storages, to the last element."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import RankError, run_ranks
from live_layouts import storages, tiny, trained, wrong
from reshard_cases import (
    Totals,
    contiguous,
    merge_stages,
    renumber,
    shards_of_rank,
    training_shard_map,
)
from thorough import and_slow
from torch import Tensor, nn

from engine.errors import ConfigError, ModelError, RolloutError
from engine.parallel.exchange import Exchange
from engine.parallel.layout import Layout, ModelShape, rollout_layout
from engine.parallel.module_shards import gather_shard_map, local_tensors
from engine.parallel.pipeline_parallel import layers_by_stage
from engine.parallel.reshard import ReshardPlan, plan_reshard
from engine.parallel.shard_maps import Box, Shard, ShardedParameter, ShardMap, rollout_shard_map


def carry(
    layout: Layout,
    pp: int,
    tp: int,
    dtype: torch.dtype,
    fused: bool,
    vocabulary: int,
    tied: bool,
    bucket_bytes: int,
) -> dict[str, Any]:
    """Train layout → rollout, twice, with an update in between; figures of this rank."""
    reference = tiny(vocabulary, tied)
    whole = {name: p.detach().clone() for name, p in reference.named_parameters()}
    shape = ModelShape.of(reference.config)
    stages = layers_by_stage(shape, layout.pp)
    model = trained(reference, layout)
    rename = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    def whole_name(name: str) -> str:
        return rename.get(name, name)

    live = gather_shard_map(model, rename=whole_name)
    shapes = {name: tuple(t.shape) for name, t in whole.items()}
    expected = training_shard_map(shapes, layout, shape, stages)
    groups = rollout_layout(layout, pp, tp)
    target = rollout_shard_map(shapes, groups, shape, dtype, merge_stages(stages, pp), fused)
    rank = dist.get_rank()
    planned = plan_reshard(live, target)
    filled = storages(target, rank, pad=5)
    source = local_tensors(model, whole_name)
    exchange = Exchange(planned.for_rank(rank), source, filled, bucket_bytes=bucket_bytes)
    with counted() as on_the_wire:
        stats = exchange.run()
        mistakes = wrong(target, rank, filled, whole)
        with torch.no_grad():
            for tensor in source.values():
                tensor.mul_(2)
        exchange.run()
    mistakes += wrong(target, rank, filled, {name: 2 * t for name, t in whole.items()})
    totals = Totals(planned)
    return {
        **asdict(stats),
        "all_to_alls": len(exchange._all_to_alls),
        "mistakes": mistakes,
        "alike": shard_map(live) == shard_map(expected),
        "planned": [int(part[rank]) for part in (totals.sent, totals.received, totals.kept)],
        "bound": int(totals.lower_bound[rank]),
        "model_bytes": totals.model_bytes,
        "wire": on_the_wire[0],
    }


def shard_map(shard_map: ShardMap) -> dict[str, set[tuple[Box, int]]]:
    """Which rank holds which boxes, in any order."""
    return {
        name: {(one.box, rank) for one in sharded.shards for rank in one.ranks}
        for name, sharded in shard_map.parameters.items()
    }


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that all-to-alls bring to this rank from others meanwhile."""
    real, total = dist.all_to_all_single, [0]

    def count(output: Tensor, input: Tensor, *splits: Any, **more: Any) -> Any:
        total[0] += output.nbytes
        assert splits[0][dist.get_rank()] == splits[1][dist.get_rank()] == 0, "sent to itself"
        return real(output, input, *splits, **more)

    with patch.object(dist, "all_to_all_single", count):
        yield total


CASES = {  # layout, p_g, t_g, dtype, fused, vocabulary, tied, share of the model that a rank gets
    "fsdp4-tp2": (Layout(fsdp=4), 1, 2, torch.bfloat16, True, 128, False, None),
    "tp4-tp2": (Layout(tp=4), 1, 2, torch.float32, False, 128, False, 1 / 4),
    "tp4-tp2-odd-vocabulary": (Layout(tp=4), 1, 2, torch.bfloat16, True, 101, True, None),
    "pp2-tp2-to-tp2": (Layout(pp=2, tp=2), 1, 2, torch.bfloat16, True, 128, False, 1 / 4),
    "pp2-tp2-to-tp1": (Layout(pp=2, tp=2), 1, 1, torch.float32, False, 128, False, 3 / 4),
    "pp2-tp2-tied": (Layout(pp=2, tp=2), 2, 1, torch.bfloat16, False, 101, True, None),
    "fsdp2-tp2-to-tp2": (Layout(fsdp=2, tp=2), 1, 2, torch.bfloat16, False, 101, False, 1 / 4),
    "fsdp2-tp2-to-tp4": (Layout(fsdp=2, tp=2), 1, 4, torch.bfloat16, True, 101, True, None),
    "dp2-fsdp2-to-tp1": (Layout(dp=2, fsdp=2), 1, 1, torch.bfloat16, True, 101, True, 1 / 2),
    "pp2-fsdp2-to-tp4": (Layout(pp=2, fsdp=2), 1, 2, torch.float32, True, 128, False, None),
}


MORE = ["tp4-tp2", "pp2-tp2-to-tp2", "pp2-tp2-to-tp1", "fsdp2-tp2-to-tp2"]


@pytest.mark.parametrize("case", and_slow([c for c in CASES if c not in MORE], MORE))
def test_rollout_gets_the_trainer_s_weights(case: str) -> None:
    layout, pp, tp, dtype, fused, vocabulary, tied, share = CASES[case]
    bucket = 4096
    results = run_ranks(4, carry, layout, pp, tp, dtype, fused, vocabulary, tied, bucket)
    for figures in results:
        assert figures["mistakes"] == []
        assert figures["alike"], "training_shard_map is not what the live model holds"
        assert figures["planned"] == [figures["sent"], figures["received"], figures["copied"]]
        assert figures["received"] == figures["bound"] == figures["wire"] // 2  # of two runs
        assert figures["buffers"] <= 2 * bucket
        assert figures["all_to_alls"] > 1
    if share is not None:  # the mean: stages are not of one size, and norms are on all ranks
        mean = sum(figures["received"] for figures in results) / 4
        assert mean / results[0]["model_bytes"] == pytest.approx(share, abs=0.02)


def peak(bucket_bytes: int) -> tuple[int, int]:
    """Most memory that a run holds above what there was, and bytes received, on this rank."""
    layout = Layout(fsdp=2)
    model = trained(tiny(2048), layout)
    live = gather_shard_map(model)
    shape = ModelShape.of(model.config)
    target = rollout_shard_map(live.shapes, contiguous(2), shape, torch.bfloat16)
    filled = storages(target, dist.get_rank())
    part = plan_reshard(live, target).for_rank(dist.get_rank())
    exchange = Exchange(part, local_tensors(model), filled, bucket_bytes=bucket_bytes)
    exchange.run()
    with torch.profiler.profile(profile_memory=True) as profile:
        stats = exchange.run()
    most = now = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, stats.received


def test_it_takes_two_buckets_of_memory_and_no_more() -> None:
    bucket = 16384
    for most, received in run_ranks(2, peak, bucket):
        assert received > 8 * bucket
        assert bucket < most <= 2 * bucket + 4096  # and small things such as sizes


NAMES = ("a", "b", "c", "d")


def to_another_rank() -> ReshardPlan:
    """Rank 0 has four parameters of 8 elements, rank 1 is to have them."""

    def on(rank: int) -> ShardMap:
        shard_map = (Shard(Box((0,), (8,)), (0,), (rank,)),)
        parameters = {name: ShardedParameter((8,), name, shard_map) for name in NAMES}
        return ShardMap(2, parameters, dict.fromkeys(NAMES, torch.float32))

    return plan_reshard(on(0), on(1))


def fails_midway(how: str) -> dict[str, Any]:
    """A run that succeeds, then one in which something is wrong; what this rank sees of that."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    rank = dist.get_rank()
    source = {} if rank else {name: torch.ones(8) for name in NAMES}
    target = {name: torch.zeros(8) for name in NAMES} if rank else {}
    part = to_another_rank().for_rank(rank)
    exchange = Exchange(part, source, target, group, bucket_bytes=36)
    with pytest.raises(RolloutError, match="never filled"):
        exchange.require_intact()
    exchange.run()
    assert len(exchange._all_to_alls) == 4
    exchange.require_intact()
    for tensor in source.values():
        tensor.fill_(2.0)
    if rank == 0 and how == "the sender lacks its last parameter":
        del source["d"]
    if rank == 1 and how == "the receiver has no room for it":
        target["d"] = torch.zeros(7)
    store = dist.distributed_c10d._get_default_store()
    started = time.perf_counter()
    seen: dict[str, Any] = {"run": "", "ask": ""}
    if rank or how != "the sender stays away":
        try:
            exchange.run()
        except RolloutError as error:
            seen |= {"run": str(error), "cause": type(error.__cause__).__name__}
        try:
            exchange.require_intact()
        except RolloutError as error:
            seen["ask"] = str(error)
    seconds = time.perf_counter() - started
    store.set(str(rank), "")
    store.wait(["0", "1"], timedelta(seconds=30))  # no rank fails by another's goodbye
    values = {float(tensor[0]) for tensor in target.values()}
    return seen | {"seconds": seconds, "values": values}


@pytest.mark.parametrize(
    ("how", "causes", "values"),
    [
        ("the sender stays away", ["", "RuntimeError"], {1.0}),
        ("the sender lacks its last parameter", ["KeyError", "RuntimeError"], {1.0, 2.0}),
        ("the receiver has no room for it", ["RuntimeError", "RuntimeError"], {0.0, 2.0}),
    ],
)
def test_a_run_that_fails_midway_marks_the_weights_on_every_rank(
    how: str, causes: list[str], values: set[float]
) -> None:
    results = run_ranks(2, fails_midway, how)
    assert results[1]["values"] == values  # what must not be served
    for rank, (seen, cause) in enumerate(zip(results, causes, strict=True)):
        if not cause:
            continue
        assert seen["cause"] == cause
        assert seen["seconds"] < 20
        assert f"bringing rollout's weights on rank {rank} of 2 up to date failed" in seen["run"]
        failed = f"rollout's weights on rank {rank} can't be served: an exchange failed midway"
        assert failed in seen["ask"]


def test_the_next_run_that_succeeds_clears_the_mark() -> None:
    source, target = {"w": torch.ones(8)}, {"w": torch.zeros(8)}
    exchange = Exchange(alone().for_rank(0), source, target)
    with pytest.raises(RolloutError, match="can't be served: they were never filled"):
        exchange.require_intact()
    exchange.run()
    weights = source.pop("w")
    with pytest.raises(RolloutError, match="rank 0 of 1 up to date failed: KeyError"):
        exchange.run()
    with pytest.raises(RolloutError, match=r"failed midway \(KeyError"):
        exchange.require_intact()
    source["w"] = 3 * weights
    exchange.run()
    exchange.require_intact()
    assert target["w"].tolist() == [3.0] * 8


def separate() -> list[float]:
    """Ranks 0 and 1 train; rank 2 rolls out, holds nothing before, and gets everything."""
    shape = ModelShape(1, 1, 1, 4, 4, 4, 8)
    shapes = {"lm_head.weight": (8, 4), "model.norm.weight": (4,)}
    source = renumber(training_shard_map(shapes, Layout(fsdp=2), shape), [0, 1], 3)
    target = renumber(rollout_shard_map(shapes, contiguous(1), shape, torch.float32), [2], 3)
    rank = dist.get_rank()
    parts = {
        name: torch.full(shard.box.size, float(rank + 1))
        for name, _, shard in shards_of_rank(source, rank)
    }
    filled = storages(target, rank)
    Exchange(plan_reshard(source, target).for_rank(rank), parts, filled).run()
    return [value for tensor in filled.values() for value in tensor.flatten().tolist()]


def test_separate_rollout_ranks() -> None:
    assert run_ranks(3, separate) == [[], [], [1.0] * 16 + [2.0] * 16 + [1.0] * 2 + [2.0] * 2]


def mixed() -> bool:
    """Parameters of two dtypes in one plan."""
    parameters = {n: two_ranks().target.parameters["w"] for n in ("a", "b", "c")}
    halves = {n: two_ranks().source.parameters["w"] for n in ("a", "b", "c")}
    dtypes = {"a": torch.bfloat16, "b": torch.float32, "c": torch.bfloat16}
    rank = dist.get_rank()
    filled = {n: torch.zeros(8, dtype=dtype) for n, dtype in dtypes.items()}
    planned = plan_reshard(ShardMap(2, halves, {}), ShardMap(2, parameters, dtypes))
    rank_plan = planned.for_rank(rank)
    rank_plan.storages.update({n: n for n in filled})
    source = {n: torch.arange(4.0) + 4 * rank + 10 * i for i, n in enumerate(filled)}
    Exchange(rank_plan, source, filled).run()
    return all(
        torch.equal(t.float(), torch.arange(8.0) + 10 * i) for i, t in enumerate(filled.values())
    )


def test_two_dtypes() -> None:
    assert run_ranks(2, mixed) == [True, True]


def two_ranks(dtype: torch.dtype = torch.float32) -> ReshardPlan:
    """Each rank has half of 8 elements and is to have all."""
    halves = tuple(Shard(Box((4 * r,), (4,)), (0,), (r,)) for r in range(2))
    source = ShardMap(2, {"w": ShardedParameter((8,), "w", halves)}, {"w": torch.float32})
    both = (Shard(Box((0,), (8,)), (0,), (0, 1)),)
    return plan_reshard(source, ShardMap(2, {"w": ShardedParameter((8,), "w", both)}, {"w": dtype}))


def alone(dtype: torch.dtype = torch.float32) -> ReshardPlan:
    whole = ShardMap(
        1, {"w": ShardedParameter((8,), "w", (Shard(Box((0,), (8,)), (0,), (0,)),))}, {"w": dtype}
    )
    return plan_reshard(whole, whole)


def test_a_rank_alone_shares_or_copies() -> None:
    weights = torch.arange(8.0)
    part = alone().for_rank(0)
    stats = Exchange(part, {"w": weights}, {"w": weights}).run()
    assert (stats.shared, stats.copied, stats.received, stats.buffers) == (32, 0, 0, 0)
    copy = nn.Parameter(torch.zeros(8))
    stats = Exchange(part, {"w": weights}, {"w": copy}).run()
    assert (stats.shared, stats.copied) == (0, 32)
    assert torch.equal(copy, weights)


def test_tensors_may_move_between_runs() -> None:
    source, target = {"w": torch.arange(8.0)}, {"w": torch.zeros(8)}
    exchange = Exchange(alone().for_rank(0), source, target)
    source["w"], target["w"] = torch.ones(8), torch.zeros(8)
    exchange.run()
    assert target["w"].tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("make", "error", "problem"),
    [
        (
            lambda: Exchange(two_ranks().for_rank(0), {}, {}),
            ConfigError,
            "a plan for rank 0 of 2 can't run as rank 0 of 1",
        ),
        (
            lambda: Exchange(alone().for_rank(0), {}, {"w": torch.zeros(8)}),
            ModelError,
            r"the trainer's 'w' up to \[8\] on this rank, which has no such tensor",
        ),
        (
            lambda: Exchange(alone().for_rank(0), {"w": torch.zeros(8)}, {"w": torch.zeros(7)}),
            ModelError,
            r"the rollout engine's 'w' up to \[8\] on this rank, which has one of \[7\]",
        ),
        (
            lambda: Exchange(
                alone(torch.bfloat16).for_rank(0), {"w": torch.zeros(8)}, {"w": torch.zeros(8)}
            ),
            ModelError,
            r"'w' is torch.float32, the plan is for torch.bfloat16",
        ),
    ],
)
def test_what_does_not_fit(make: Callable[[], Any], error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        make()


def small_buckets() -> None:
    Exchange(
        two_ranks().for_rank(dist.get_rank()),
        {"w": torch.zeros(4)},
        {"w": torch.zeros(8)},
        bucket_bytes=4,
    )


def test_buckets_without_room_for_every_peer() -> None:
    with pytest.raises(RankError, match="buckets of 4 bytes are too small for 1 peers"):
        run_ranks(2, small_buckets)


def other_models() -> None:
    gather_shard_map(nn.Linear(4, 2 + dist.get_rank()))


def test_ranks_with_different_models() -> None:
    with pytest.raises(RankError, match=r"rank 1 holds 'weight' as \[3, 4\] torch.float32, rank 0"):
        run_ranks(2, other_models)
