"""What moving a policy from its training layout to the rollout's sends, and the memory it takes.

`python benchmarks/reshard.py --help`. Two tables, in shares of the model M:

- measured on gloo ranks of this machine, with a live Qwen2-shaped model: HybridFlow's formula
  (arXiv:2409.19256, table 2), what the plan says, the bytes counted at the sends, and the newly
  taken memory at its peak; beside it a full all-gather (every rank gets the whole model, then cuts
  its slices out), run on the same ranks;
- planned only, for the shapes of a 7B and a 70B model on up to 1,024 ranks: no weights, no ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from engine.config import ParallelConfig
from engine.console import command_line
from engine.parallel.exchange import Exchange, view
from engine.parallel.fsdp import shard_model
from engine.parallel.layout import Layout, ModelShape, RolloutLayout, rollout_layout
from engine.parallel.module_shards import gather_full_tensors, gather_shard_map, local_tensors
from engine.parallel.pipeline_parallel import extract_stage, layers_by_stage
from engine.parallel.process_groups import Ranks
from engine.parallel.reshard import RankPlan, ReshardPlan, plan_reshard, shards_by_rank
from engine.parallel.shard_maps import (
    Box,
    Shard,
    ShardMap,
    chunk,
    rollout_shard_map,
)
from engine.parallel.tensor_parallel import apply_tensor_parallel

WORLD = 4
DEADLINE_S = 600


@dataclass(frozen=True, slots=True)
class Case:
    """From a training layout to a rollout of `pp` stages and `tp` shares."""

    layout: Layout
    pp: int
    tp: int

    def __str__(self) -> str:
        rollout = Layout(pp=self.pp, dp=self.layout.world_size // self.pp // self.tp, tp=self.tp)
        return f"{self.layout} → {rollout}"

    @property
    def formula(self) -> float | None:
        """(t·p − t_g·p_g) / (t_g·p_g·t·p), for layouts that share weights by tp and pp alone."""
        train, rollout = self.layout.tp * self.layout.pp, self.tp * self.pp
        if self.layout.fsdp * self.layout.sp > 1:
            return None
        return (train - rollout) / (rollout * train)


MEASURED = [
    Case(Layout(tp=4), 1, 2),
    Case(Layout(tp=4), 1, 1),
    Case(Layout(pp=2, tp=2), 1, 2),
    Case(Layout(pp=2, tp=2), 2, 1),
    Case(Layout(pp=2, tp=2), 1, 1),
    Case(Layout(pp=4), 1, 1),
    Case(Layout(dp=2, tp=2), 1, 1),
    Case(Layout(dp=2, tp=2), 1, 2),
    Case(Layout(fsdp=4), 1, 1),
    Case(Layout(fsdp=4), 1, 2),
    Case(Layout(fsdp=2, tp=2), 1, 2),
]
PLANNED = {
    "7B": [
        Case(Layout(tp=8), 1, 2),
        Case(Layout(dp=8, tp=8), 1, 2),
        Case(Layout(fsdp=64), 1, 1),
        Case(Layout(pp=2, dp=16, tp=8), 1, 2),
        Case(Layout(dp=128, tp=8), 1, 1),
        Case(Layout(fsdp=1024), 1, 2),
    ],
    "70B": [
        Case(Layout(pp=2, dp=2, tp=8), 1, 8),
        Case(Layout(pp=4, dp=4, tp=8), 1, 8),
        Case(Layout(fsdp=128), 1, 8),
        Case(Layout(pp=8, dp=16, tp=8), 1, 8),
        Case(Layout(pp=8, dp=16, tp=8), 2, 4),
        Case(Layout(fsdp=1024), 1, 8),
    ],
}
SHAPES = {  # layers, heads, key heads, hidden, intermediate, vocabulary
    "7B": (32, 32, 32, 4096, 11008, 32000),
    "70B": (80, 64, 8, 8192, 28672, 128256),
}


@command_line()
def main() -> None:
    args = parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that sees memory is talkative
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    found: dict[str, Any] = {"case": vars(args)}
    if args.repeats:
        found["measured"] = measured(args)
    if args.planned:
        found["planned"] = planned(args.planned)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2, default=str), encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Bytes and memory of resharding, beside HybridFlow's formula and all-gather.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the live model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--bucket-kib", type=int, default=2048, help="size of one bucket")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed runs of each case; 0: measure nothing"
    )
    parser.add_argument(
        "--planned", nargs="*", choices=list(SHAPES), default=list(SHAPES), help="plan for these"
    )
    parser.add_argument("--json", help="write figures to this file as well")
    return parser.parse_args()


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all cases on the ranks and print them."""
    with tempfile.TemporaryDirectory(prefix="reshard-") as folder:
        ranks = mp.spawn(serve, (folder, args), nprocs=WORLD, join=False)
        deadline = time.monotonic() + DEADLINE_S
        while not ranks.join(timeout=1.0):
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
                raise SystemExit(f"the ranks did not finish within {DEADLINE_S} s")
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "rows").read_text())
    print(
        f"Measured on {WORLD} gloo ranks: {rows[0]['parameters'] / 1e6:.0f}M parameters, "
        f"{args.dtype}, buckets of {args.bucket_kib} KiB. Shares of the model's bytes; bytes a "
        "rank are the mean of all ranks, peaks those of newly taken memory.\n\n"
        "| train → rollout | formula | planned | measured | all-gather | peak | all-gather's peak "
        "| copied | ms | all-gather's ms |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        print(
            f"| {row['case']} | {share(row['formula'])} | {share(row['planned'])} | "
            f"{share(row['measured'])} | {share(row['gathered'])} | {share(row['peak'])} | "
            f"{share(row['gather_peak'])} | {share(row['copied'])} | {row['ms']:.0f} | "
            f"{row['gather_ms']:.0f} |"
        )
    return rows


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def serve(rank: int, folder: str, args: argparse.Namespace) -> None:
    """One rank: all cases, one after the other."""
    os.environ["GOMP_SPINCOUNT"] = "2000"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=DEADLINE_S / 5),
    )
    rows = [measure(case, args) for case in MEASURED]
    if rank == 0:
        (Path(folder) / "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """One case; figures are means over ranks, as shares of the model."""
    whole = build(args)
    shape = ModelShape.of(whole.config)
    stages = layers_by_stage(shape, case.layout.pp)
    ranks = Ranks.form(case.layout)
    model = shard_like_trainer(whole, case.layout, ranks)
    source = gather_shard_map(model)
    wanted = rollout_shard_map(
        source.shapes,
        rollout_layout(case.layout, case.pp, case.tp),
        shape,
        getattr(torch, args.dtype),
        merge_stages(stages, case.pp),
    )
    full = plan_reshard(source, wanted)
    part = full.for_rank(dist.get_rank())
    gather_peak, gather_s = timed(lambda: gather_and_cut(model, ranks, wanted), args.repeats)
    own = sum(tensor.nbytes for tensor in local_tensors(model).values())
    sent: list[int] = []
    peak, _ = timed(lambda: first_exchange(model, part, args).run(), 0)
    exchange = first_exchange(model, part, args)
    with counted(sent):
        stats = exchange.run()
    _, seconds = timed(exchange.run, args.repeats)
    total = Totals(full).model_bytes
    figures = {
        "planned": int(Totals(full).received[dist.get_rank()]),
        "measured": sent[-1],
        "gathered": total - own,
        "peak": peak,
        "gather_peak": gather_peak,
        "copied": stats.copied,
    }
    assert sent[-1] == stats.sent == Totals(full).sent[dist.get_rank()], "other bytes than planned"
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, figures)
    means = {name: statistics.mean(f[name] for f in every) / total for name in figures}
    return {
        "case": str(case),
        "formula": case.formula,
        **means,
        "ms": 1000 * seconds,
        "gather_ms": 1000 * gather_s,
        "parameters": sum(p.numel() for p in build(args).parameters()),
    }


def build(args: argparse.Namespace) -> PreTrainedModel:
    """A Qwen2-shaped model with random weights, alike on all ranks."""
    torch.manual_seed(0)
    heads = args.hidden // 64
    config = Qwen2Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(4, heads // 2),
        tie_word_embeddings=False,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, args.dtype)
    )
    return model


def shard_like_trainer(model: Any, layout: Layout, ranks: Ranks) -> Any:
    """This rank's part, sharded as a trainer does."""
    part: Any = model
    if layout.pp > 1:
        part = extract_stage(model, ranks.index("pp"), layout.pp)
    if layout.tp > 1:
        apply_tensor_parallel(part, ranks.submesh("tp"))
    layers = part.layers if layout.pp > 1 else part.model.layers
    shard_model(part, ranks, ParallelConfig(**layout.sizes), layers=list(layers))
    return part


def first_exchange(model: Any, part: RankPlan, args: argparse.Namespace) -> Exchange:
    """Rollout's tensors, and an exchange into them."""
    dtype = getattr(torch, args.dtype)
    target = {name: torch.empty(size, dtype=dtype) for name, size in part.target_shapes().items()}
    return Exchange(part, local_tensors(model), target, bucket_bytes=args.bucket_kib << 10)


def gather_and_cut(model: Any, ranks: Ranks, wanted: ShardMap) -> dict[str, Tensor]:
    """The baseline: the whole model on every rank, then its slices, each whole dropped when cut."""
    whole = {name: tensor.clone() for name, tensor in gather_full_tensors(model, ranks)}
    target: dict[str, Tensor] = {}
    for name, sharded in wanted.parameters.items():
        for shard in sharded.shards:
            if dist.get_rank() in shard.ranks:
                target[sharded.storage] = view(
                    whole.pop(name), shard.box.offset, shard.box.size
                ).clone()
    return target


class counted:
    """Counts the bytes that this rank hands to all-to-alls for others, while it is entered."""

    def __init__(self, into: list[int]) -> None:
        self._into, self._real = into, dist.all_to_all_single

    def __enter__(self) -> None:
        self._into.append(0)

        def send(
            output: Tensor, input: Tensor, out: list[int], into: list[int], **more: Any
        ) -> Any:
            others = sum(size for rank, size in enumerate(into) if rank != dist.get_rank())
            self._into[-1] += others * input.element_size()
            return self._real(output, input, out, into, **more)

        dist.all_to_all_single = send  # type: ignore[assignment]

    def __exit__(self, *error: Any) -> None:
        dist.all_to_all_single = self._real


def timed(run: Callable[[], Any], repeats: int) -> tuple[int, float]:
    """Newly taken memory of a first run at its peak, in bytes; median seconds of the others."""
    dist.barrier()
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    most = now = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        run()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    return most, statistics.median(seconds) if seconds else 0.0


def planned(sizes: Sequence[str]) -> list[dict[str, Any]]:
    """Make the plan for large models on many ranks, and print it."""
    print(
        "\nPlanned for bfloat16 rollout, in GB a rank (mean of all ranks; the most that one gets "
        "in brackets). Peak: rollout's share of the model and two buckets of 64 MiB.\n\n"
        "| model | ranks | train → rollout | formula | planned | lower bound | neighbours' groups "
        "| all-gather | peak | all-gather's peak | s to plan |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    rows = []
    for size in sizes:
        for case in PLANNED[size]:
            row = plan_one(size, case)
            rows.append(row)
            print(
                f"| {size} | {case.layout.world_size} | {case} | {gigabytes(row['formula'])} | "
                f"{gigabytes(row['planned'])} ({gigabytes(row['most'])}) | "
                f"{gigabytes(row['bound'])} | {gigabytes(row['neighbours'])} | "
                f"{gigabytes(row['gathered'])} | {gigabytes(row['peak'])} | "
                f"{gigabytes(row['model_bytes'])} | {row['seconds']:.1f} |",
                flush=True,
            )
    return rows


def gigabytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e9:.2f}"


def subtract_all(box: Box, others: Iterable[Box]) -> list[Box]:
    """Return the elements of `box` that none of `others` has, as boxes that don't overlap."""
    remaining = [box] if box.elements else []
    for other in others:
        remaining = [piece for part in remaining for piece in part.subtract(other)]
    return remaining


@dataclass(frozen=True)
class Totals:
    """The bytes of a plan, by rank [W]."""

    plan: ReshardPlan

    @property
    def sent(self) -> NDArray[np.int64]:
        """Bytes that each rank sends, [W]."""
        return self._total(axis=1)

    @property
    def received(self) -> NDArray[np.int64]:
        """Bytes that each rank receives, [W]."""
        return self._total(axis=0)

    @property
    def lower_bound(self) -> NDArray[np.int64]:
        """Bytes that each rank wants and lacks, [W]: from the shard maps alone."""
        return self._target_bytes(lacking=True)

    @property
    def kept(self) -> NDArray[np.int64]:
        """Bytes that each rank wants and has already, [W]."""
        return self._target_bytes() - self._target_bytes(lacking=True)

    @property
    def model_bytes(self) -> int:
        """Bytes of the whole model in the target's dtypes."""
        return sum(g.dtype.itemsize * math.prod(g.shape) * len(g.names) for g in self.plan.groups)

    def _total(self, axis: int) -> NDArray[np.int64]:
        total = np.zeros(self.plan.target.world_size, np.int64)
        for dtype, matrix in self.plan.traffic.items():
            total += dtype.itemsize * matrix.sum(axis=axis)
        return total

    def _target_bytes(self, lacking: bool = False) -> NDArray[np.int64]:
        total = np.zeros(self.plan.target.world_size, np.int64)
        for group in self.plan.groups:
            sources = shards_by_rank(group.source) if lacking else {}
            size = group.dtype.itemsize * len(group.names)
            for shard in group.target:
                for rank in shard.ranks:
                    held_boxes = (held.box for held in sources.get(rank, ()))
                    parts = subtract_all(shard.box, held_boxes)
                    total[rank] += size * sum(part.elements for part in parts)
        return total


def plan_one(size: str, case: Case) -> dict[str, Any]:
    """Bytes a rank of one case, by HybridFlow's grouping and by groups of neighbours."""
    model, shapes = llama(size)
    stages = layers_by_stage(model, case.layout.pp)
    source = training_shard_map(shapes, case.layout, model, stages)

    def to(groups: RolloutLayout) -> ReshardPlan:
        rollout_stages = merge_stages(stages, case.pp)
        wanted = rollout_shard_map(
            shapes, groups, model, torch.bfloat16, rollout_stages, fused=True
        )
        return plan_reshard(source, wanted)

    started = time.perf_counter()
    found = to(rollout_layout(case.layout, case.pp, case.tp))
    part = found.for_rank(case.layout.world_size - 1)
    seconds = time.perf_counter() - started
    totals = Totals(found)
    assert (totals.received == totals.lower_bound).all()
    assert len(part.receives) > 0 or int(totals.received[-1]) == 0
    copies = case.layout.world_size // (case.pp * case.tp)
    other = to(RolloutLayout((("dp", copies), ("pp", case.pp), ("tp", case.tp))))
    own = totals.model_bytes / (case.layout.world_size / case.layout.dp)
    share = case.formula
    return {
        "model": size,
        "case": asdict(case),
        "formula": None if share is None else share * totals.model_bytes,
        "planned": float(totals.received.mean()),
        "most": int(totals.received.max()),
        "bound": float(totals.lower_bound.mean()),
        "neighbours": float(Totals(other).received.mean()),
        "gathered": totals.model_bytes - own,
        "peak": float((totals.received + totals.kept).mean()) + 2 * (64 << 20),
        "model_bytes": totals.model_bytes,
        "seconds": seconds,
    }


def training_shard_map(
    shapes: dict[str, tuple[int, ...]], layout: Layout, model: ModelShape, stages: list[range]
) -> ShardMap:
    """A trainer's stages, tensor parallel shards of them, and FSDP2's chunks of their rows."""
    ranks = RolloutLayout(tuple(layout.sizes.items()))
    unsharded = rollout_shard_map(shapes, ranks, model, torch.float32, stages)
    size = layout.fsdp * layout.sp

    @cache
    def rows(shards: tuple[Shard, ...]) -> tuple[Shard, ...]:
        found: dict[Box, list[int]] = {}
        for one in shards:
            for rank in one.ranks:
                at = layout.coordinates(rank)
                box = chunk(one.box, 0, size, at["fsdp"] * layout.sp + at["sp"])
                found.setdefault(box, []).append(rank)
        return tuple(Shard(b, (0,) * len(b.size), tuple(r)) for b, r in found.items() if b.elements)

    parameters = {
        n: replace(one, shards=rows(one.shards)) for n, one in unsharded.parameters.items()
    }
    return ShardMap(layout.world_size, parameters, unsharded.dtypes)


def merge_stages(stages: list[range], count: int) -> list[range]:
    """Join neighbouring training stages into `count` rollout stages."""
    step = len(stages) // count
    return [range(stages[i].start, stages[i + step - 1].stop) for i in range(0, len(stages), step)]


def llama(size: str) -> tuple[ModelShape, dict[str, tuple[int, ...]]]:
    """Sizes of a model's parameters, from a transformers model on the meta device."""
    layers, heads, kv_heads, hidden, intermediate, vocabulary = SHAPES[size]
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return ModelShape.of(config), {n: tuple(p.shape) for n, p in model.named_parameters()}


if __name__ == "__main__":
    sys.exit(main())
