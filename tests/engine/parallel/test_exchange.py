"""Live training layouts on gloo ranks, resharded into rollout's storages, to the last element."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import RankError, run_ranks
from reshard_cases import view
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.config import ParallelConfig
from engine.errors import ConfigError, ModelError
from engine.parallel.boxes import Box
from engine.parallel.exchange import Exchange
from engine.parallel.fsdp import shard_model
from engine.parallel.grouping import contiguous, grouping
from engine.parallel.holdings import Held, Holdings, Spread
from engine.parallel.layout import Layout, ModelShape
from engine.parallel.live import gather_holdings, local_tensors, tied_head
from engine.parallel.ranks import Ranks
from engine.parallel.reshard import Plan, plan
from engine.parallel.spreads import merge_stages, rollout_holdings, train_holdings
from engine.parallel.stages import layers_by_stage, take_stage
from engine.parallel.tensor import apply_tensor_parallel

EMPTY = -7.0  # what a rollout storage holds before, so that nothing is right by chance


def tiny(vocabulary: int = 128, tied: bool = False) -> Qwen2ForCausalLM:
    """The same weights for the same arguments, on every rank; float32."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Qwen2ForCausalLM(config)
        for parameter in model.parameters():
            nn.init.normal_(parameter)  # biases and norms too
        return model


def trained(model: Qwen2ForCausalLM, layout: Layout) -> nn.Module:
    """This rank's share of the model, as the trainer makes it."""
    ranks = Ranks.form(layout)
    part: Any = model
    if layout.pp > 1:
        part = take_stage(model, ranks.index("pp"), layout.pp)
    if layout.tp > 1:
        apply_tensor_parallel(part, ranks.submesh("tp"))
    layers = part.layers if layout.pp > 1 else part.model.layers
    shard_model(part, ranks, ParallelConfig(**layout.sizes), layers=list(layers))
    return part


def storages(target: Holdings, rank: int, pad: int = 0) -> dict[str, Tensor]:
    """Rollout's tensors on a rank; vocabularies have `pad` rows that no parameter fills."""
    found: dict[str, Tensor] = {}
    for name, storage, held in target.of_rank(rank):
        rows = found[storage].shape[0] if storage in found else 0
        more = pad if "embed" in storage or "lm_head" in storage else 0
        shape = (max(rows, held.start[0] + held.box.size[0] + more), *held.box.size[1:])
        found[storage] = torch.full(shape, EMPTY, dtype=target.dtypes[name])
    return found


def wrong(target: Holdings, rank: int, filled: dict[str, Tensor], whole: dict[str, Tensor]) -> list:
    """Parameters that differ from the whole model's, and storages with rows written beyond."""
    found, covered = [], {name: torch.zeros(t.shape) for name, t in filled.items()}
    for name, storage, held in target.of_rank(rank):
        expected = view(whole[name], held.box.offset, held.box.size).to(filled[storage].dtype)
        if not torch.equal(view(filled[storage], held.start, held.box.size), expected):
            found.append(name)
        view(covered[storage], held.start, held.box.size).fill_(1)
    return found + [n for n, t in filled.items() if not (t[covered[n] == 0] == EMPTY).all()]


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
    rename = tied_head if tied else None
    live = gather_holdings(model, rename=rename)
    shapes = {name: tuple(t.shape) for name, t in whole.items()}
    expected = train_holdings(shapes, layout, shape, stages)
    groups = grouping(layout, pp, tp)
    target = rollout_holdings(shapes, groups, shape, dtype, merge_stages(stages, pp), fused)
    rank = dist.get_rank()
    planned = plan(live, target)
    filled = storages(target, rank, pad=5)
    source = local_tensors(model, rename)
    exchange = Exchange(planned.for_rank(rank), source, filled, bucket_bytes=bucket_bytes)
    on_the_wire = counted()
    moved = exchange.run()
    mistakes = wrong(target, rank, filled, whole)
    with torch.no_grad():
        for tensor in source.values():
            tensor.mul_(2)
    exchange.run()
    mistakes += wrong(target, rank, filled, {name: 2 * t for name, t in whole.items()})
    return {
        **asdict(moved),
        "mistakes": mistakes,
        "alike": held(live) == held(expected),
        "planned": [int(planned.sent[rank]), int(planned.received[rank]), int(planned.kept[rank])],
        "bound": int(planned.lower_bound[rank]),
        "model_bytes": planned.model_bytes,
        "wire": on_the_wire[0],
    }


def held(holdings: Holdings) -> dict[str, set[tuple[Box, int]]]:
    """Which rank holds which boxes, in any order."""
    return {
        name: {(one.box, rank) for one in spread.held for rank in one.ranks}
        for name, spread in holdings.spreads.items()
    }


def counted() -> list[int]:
    """Bytes that collectives bring to this rank from others from now on."""
    real, total = dist.all_to_all_single, [0]

    def count(output: Tensor, input: Tensor, *splits: Any, **more: Any) -> Any:
        total[0] += output.nbytes
        assert splits[0][dist.get_rank()] == splits[1][dist.get_rank()] == 0, "sent to itself"
        return real(output, input, *splits, **more)

    dist.all_to_all_single = count
    return total


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


@pytest.mark.parametrize("case", CASES)
def test_rollout_gets_the_trainer_s_weights(case: str) -> None:
    layout, pp, tp, dtype, fused, vocabulary, tied, share = CASES[case]
    bucket = 4096
    results = run_ranks(4, carry, layout, pp, tp, dtype, fused, vocabulary, tied, bucket)
    for figures in results:
        assert figures["mistakes"] == []
        assert figures["alike"], "train_holdings is not what the live model holds"
        assert figures["planned"] == [figures["sent"], figures["received"], figures["kept"]]
        assert figures["received"] == figures["bound"] == figures["wire"] // 2  # of two runs
        assert figures["buffers"] <= 2 * bucket
        assert figures["rounds"] > 1
    if share is not None:  # the mean: stages are not of one size, and norms are on all ranks
        mean = sum(figures["received"] for figures in results) / 4
        assert mean / results[0]["model_bytes"] == pytest.approx(share, abs=0.02)


def peak(bucket_bytes: int) -> tuple[int, int]:
    """Most memory that a run holds above what there was, and bytes received, on this rank."""
    layout = Layout(fsdp=2)
    model = trained(tiny(2048), layout)
    live = gather_holdings(model)
    shape = ModelShape.of(model.config)
    target = rollout_holdings(live.shapes, contiguous(2), shape, torch.bfloat16)
    filled = storages(target, dist.get_rank())
    part = plan(live, target).for_rank(dist.get_rank())
    exchange = Exchange(part, local_tensors(model), filled, bucket_bytes=bucket_bytes)
    exchange.run()
    with torch.profiler.profile(profile_memory=True) as profile:
        moved = exchange.run()
    most = now = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, moved.received


def test_it_takes_two_buckets_of_memory_and_no_more() -> None:
    bucket = 16384
    for most, received in run_ranks(2, peak, bucket):
        assert received > 8 * bucket
        assert bucket < most <= 2 * bucket + 4096  # and small things such as sizes


def dies_midway() -> tuple[float, str]:
    """Rank 1 stays away from the exchange; what rank 0 sees."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        return 0.0, ""
    exchange = Exchange(two_ranks().for_rank(0), {"w": torch.ones(4)}, {"w": torch.ones(8)}, group)
    started = time.perf_counter()
    try:
        exchange.run()
    except RuntimeError as error:
        return time.perf_counter() - started, str(error)
    return time.perf_counter() - started, ""


def test_a_rank_that_stays_away_makes_it_raise() -> None:
    (seconds, text), _ = run_ranks(2, dies_midway)
    assert text
    assert seconds < 20


def separate() -> list[float]:
    """Ranks 0 and 1 train; rank 2 rolls out, holds nothing before, and gets everything."""
    shape = ModelShape(1, 1, 1, 4, 4, 4, 8)
    shapes = {"lm_head.weight": (8, 4), "model.norm.weight": (4,)}
    source = train_holdings(shapes, Layout(fsdp=2), shape).on([0, 1], 3)
    target = rollout_holdings(shapes, contiguous(1), shape, torch.float32).on([2], 3)
    rank = dist.get_rank()
    parts = {
        name: torch.full(held.box.size, float(rank + 1)) for name, _, held in source.of_rank(rank)
    }
    filled = storages(target, rank)
    Exchange(plan(source, target).for_rank(rank), parts, filled).run()
    return [value for tensor in filled.values() for value in tensor.flatten().tolist()]


def test_separate_rollout_ranks() -> None:
    assert run_ranks(3, separate) == [[], [], [1.0] * 16 + [2.0] * 16 + [1.0] * 2 + [2.0] * 2]


def mixed() -> bool:
    """Parameters of two dtypes in one plan."""
    spreads = {n: two_ranks().target.spreads["w"] for n in ("a", "b", "c")}
    halves = {n: two_ranks().source.spreads["w"] for n in ("a", "b", "c")}
    dtypes = {"a": torch.bfloat16, "b": torch.float32, "c": torch.bfloat16}
    rank = dist.get_rank()
    filled = {n: torch.zeros(8, dtype=dtype) for n, dtype in dtypes.items()}
    planned = plan(Holdings(2, halves, {}), Holdings(2, spreads, dtypes))
    rank_plan = planned.for_rank(rank)
    rank_plan.storages.update({n: n for n in filled})
    source = {n: torch.arange(4.0) + 4 * rank + 10 * i for i, n in enumerate(filled)}
    Exchange(rank_plan, source, filled).run()
    return all(
        torch.equal(t.float(), torch.arange(8.0) + 10 * i) for i, t in enumerate(filled.values())
    )


def test_two_dtypes() -> None:
    assert run_ranks(2, mixed) == [True, True]


def two_ranks(dtype: torch.dtype = torch.float32) -> Plan:
    """Each rank has half of 8 elements and is to have all."""
    halves = tuple(Held(Box((4 * r,), (4,)), (0,), (r,)) for r in range(2))
    source = Holdings(2, {"w": Spread((8,), "w", halves)}, {"w": torch.float32})
    both = (Held(Box((0,), (8,)), (0,), (0, 1)),)
    return plan(source, Holdings(2, {"w": Spread((8,), "w", both)}, {"w": dtype}))


def alone(dtype: torch.dtype = torch.float32) -> Plan:
    whole = Holdings(
        1, {"w": Spread((8,), "w", (Held(Box((0,), (8,)), (0,), (0,)),))}, {"w": dtype}
    )
    return plan(whole, whole)


def test_a_rank_alone_shares_or_copies() -> None:
    weights = torch.arange(8.0)
    part = alone().for_rank(0)
    moved = Exchange(part, {"w": weights}, {"w": weights}).run()
    assert (moved.shared, moved.kept, moved.received, moved.buffers) == (32, 0, 0, 0)
    copy = nn.Parameter(torch.zeros(8))
    moved = Exchange(part, {"w": weights}, {"w": copy}).run()
    assert (moved.shared, moved.kept) == (0, 32)
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
    gather_holdings(nn.Linear(4, 2 + dist.get_rank()))


def test_ranks_with_different_models() -> None:
    with pytest.raises(RankError, match=r"rank 1 holds 'weight' as \[3, 4\] torch.float32, rank 0"):
        run_ranks(2, other_models)
