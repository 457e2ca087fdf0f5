"""What the tests of resharding share: sizes, random cases, and a plan carried out in memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from engine.parallel.layout import Layout, ModelShape, RolloutLayout, rollout_layout
from engine.parallel.pipeline_parallel import split_layers
from engine.parallel.reshard import RemoteSlice, ReshardPlan, shards_by_rank
from engine.parallel.shard_maps import (
    Box,
    Index,
    Shard,
    ShardedParameter,
    ShardMap,
    chunk,
    rollout_shard_map,
)


def decoder_shapes(model: ModelShape, biases: bool = False) -> dict[str, Index]:
    """Parameters of a Qwen2 (with biases) or Llama model."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes: dict[str, Index] = {"model.embed_tokens.weight": (model.vocab, model.hidden)}
    for layer in range(model.layers):
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        for name, size in rows.items():
            shapes[f"model.layers.{layer}.self_attn.{name}.weight"] = (size, model.hidden)
            if biases:
                shapes[f"model.layers.{layer}.self_attn.{name}.bias"] = (size,)
        shapes[f"model.layers.{layer}.self_attn.o_proj.weight"] = (model.hidden, queries)
        for name in ("gate_proj", "up_proj"):
            shapes[f"model.layers.{layer}.mlp.{name}.weight"] = (model.intermediate, model.hidden)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (model.hidden, model.intermediate)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (model.hidden,)
    shapes["model.norm.weight"] = (model.hidden,)
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab, model.hidden)
    return shapes


def training_shard_map(
    shapes: dict[str, Index],
    layout: Layout,
    model: ModelShape,
    stages: Sequence[Sequence[int]] | None = None,
) -> ShardMap:
    """A trainer's stages, tensor parallel shards of them, and FSDP2's chunks of their rows."""
    ranks = RolloutLayout(tuple(layout.sizes.items()))
    unsharded = rollout_shard_map(shapes, ranks, model, torch.float32, stages)
    size = layout.fsdp * layout.sp

    @cache
    def rows(shards: tuple[Shard, ...]) -> tuple[Shard, ...]:
        found: dict[Box, list[int]] = defaultdict(list)
        for one in shards:
            for rank in one.ranks:
                at = layout.coordinates(rank)
                found[chunk(one.box, 0, size, at["fsdp"] * layout.sp + at["sp"])].append(rank)
        return tuple(Shard(b, (0,) * len(b.size), tuple(r)) for b, r in found.items() if b.elements)

    parameters = {
        n: replace(one, shards=rows(one.shards)) for n, one in unsharded.parameters.items()
    }
    return ShardMap(layout.world_size, parameters, unsharded.dtypes)


def contiguous(world_size: int, pp: int = 1, tp: int = 1) -> RolloutLayout:
    """Rollout groups of neighbours, as vLLM and Megatron make their own."""
    return RolloutLayout((("dp", world_size // (pp * tp)), ("pp", pp), ("tp", tp)))


def merge_stages(stages: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Join neighbouring training stages into `count` rollout stages."""
    step = len(stages) // count
    return [list(chain(*stages[i : i + step])) for i in range(0, len(stages), step)]


def renumber(shard_map: ShardMap, ranks: Sequence[int], world_size: int) -> ShardMap:
    """The same shard map where `ranks[i]` of `world_size` is what rank i was."""
    parameters = {
        name: replace(
            sharded,
            shards=tuple(
                replace(h, ranks=tuple(ranks[r] for r in h.ranks)) for h in sharded.shards
            ),
        )
        for name, sharded in shard_map.parameters.items()
    }
    return ShardMap(world_size, parameters, shard_map.dtypes)


def shards_of_rank(shard_map: ShardMap, rank: int) -> Iterator[tuple[str, str, Shard]]:
    """Parameter name, storage name and box of all that `rank` holds."""
    for name, sharded in shard_map.parameters.items():
        for shard in sharded.shards:
            if rank in shard.ranks:
                yield name, sharded.storage, shard


@st.composite
def model_shapes(draw: st.DrawFn) -> ModelShape:
    """Sizes that tp up to 4 divides in training; odd vocabularies, grouped heads, tied or not."""
    kv_heads = draw(st.sampled_from([4, 8]))
    return ModelShape(
        layers=draw(st.integers(4, 6)),
        heads=kv_heads * draw(st.sampled_from([1, 2])),
        kv_heads=kv_heads,
        head_dim=2,
        hidden=draw(st.sampled_from([5, 8])),
        intermediate=draw(st.sampled_from([16, 48])),
        vocab=draw(st.integers(7, 140)),
        tied=draw(st.booleans()),
    )


@st.composite
def layouts(draw: st.DrawFn, most: int = 16) -> Layout:
    sizes = [draw(st.sampled_from([1, 2, 4])) for _ in range(5)]
    while Layout(*sizes).world_size > most:
        sizes[sizes.index(max(sizes))] //= 2
    return Layout(*sizes)


@st.composite
def cases(draw: st.DrawFn, most: int = 16) -> tuple[Layout, RolloutLayout, ShardMap, ShardMap]:
    """A training layout, a rollout layout of the same ranks, and what both hold."""
    model, layout = draw(model_shapes()), draw(layouts(most))
    pp = draw(st.sampled_from([n for n in (1, 2, 4) if layout.pp % n == 0]))
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n * layout.pp <= layout.world_size]))
    if tp > 2 * model.kv_heads or model.heads % tp:
        tp = 1
    nested = draw(st.booleans())
    groups = rollout_layout(layout, pp, tp) if nested else contiguous(layout.world_size, pp, tp)
    stages = split_layers(model.layers, layout.pp, last=draw(st.sampled_from([0.0, 1.5])))
    source = training_shard_map(decoder_shapes(model, draw(st.booleans())), layout, model, stages)
    target = rollout_shard_map(
        source.shapes,
        groups,
        model,
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        merge_stages(stages, pp),
        fused=draw(st.booleans()),
    )
    return layout, groups, source, target


@st.composite
def random_shards(draw: st.DrawFn, shape: Index, ranks: int, whole: bool) -> ShardedParameter:
    """Boxes anywhere, one or none a rank; with `whole`, some rank holds all."""
    found = []
    all_of_it = draw(st.integers(0, ranks - 1)) if whole else None
    for rank in range(ranks):
        if rank == all_of_it:
            found.append(Shard(Box.whole(shape), (0,) * len(shape), (rank,)))
            continue
        offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
        size = tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, offset, strict=True))
        if Box(offset, size).elements:
            start = tuple(draw(st.integers(0, 2)) for _ in shape)
            found.append(Shard(Box(offset, size), start, (rank,)))
    return ShardedParameter(shape, "w", tuple(found))


def view(tensor: Tensor, start: Index, size: Index) -> Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]


def numbered(shapes: dict[str, Index]) -> dict[str, Tensor]:
    """Whole parameters in which every element is another number."""
    count, found = 1, {}
    for name, shape in shapes.items():
        size = Box.whole(shape).elements
        found[name] = torch.arange(count, count + size, dtype=torch.int64).view(shape)
        count += size
    return found


def local_parts(shard_map: ShardMap, whole: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What a rank's storages hold, as little as will do; 0 is what no box covers."""
    found: dict[str, Tensor] = {}
    for name, storage, shard in shards_of_rank(shard_map, rank):
        end = tuple(a + n for a, n in zip(shard.start, shard.box.size, strict=True))
        before = found.get(storage, torch.zeros(end, dtype=whole[name].dtype))
        shape = tuple(map(max, before.shape, end))
        found[storage] = torch.zeros(shape, dtype=before.dtype)
        view(found[storage], (0,) * before.dim(), tuple(before.shape)).copy_(before)
        part = view(whole[name], shard.box.offset, shard.box.size)
        view(found[storage], shard.start, shard.box.size).copy_(part)
    return found


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


def carry_out(
    plan: ReshardPlan, source: list[dict[str, Tensor]]
) -> tuple[list[dict[str, Tensor]], list]:
    """Every rank's target storages after the plan, and how often each element was written."""
    ranks = [plan.for_rank(rank) for rank in range(plan.target.world_size)]
    target = [
        {s: torch.zeros(n, dtype=torch.int64) for s, n in r.target_shapes().items()} for r in ranks
    ]
    written = [{s: torch.zeros_like(t) for s, t in tensors.items()} for tensors in target]

    def write(rank: int, name: str, start: Index, size: Index, values: Tensor) -> None:
        storage = ranks[rank].storages[name]
        view(target[rank][storage], start, size).copy_(values)
        view(written[rank][storage], start, size).add_(1)

    on_the_way: dict[tuple[int, int], list[tuple[RemoteSlice, Tensor]]] = defaultdict(list)
    for rank in ranks:
        for one in rank.sends:
            storage = plan.source.parameters[one.parameter].storage
            values = view(source[rank.rank][storage], one.start, one.size)
            assert tuple(values.shape) == one.size, "a rank sends what it does not hold"
            on_the_way[rank.rank, one.peer].append((one, values))
        for kept in rank.local_copies:
            values = view(
                source[rank.rank][plan.source.parameters[kept.parameter].storage],
                kept.source,
                kept.size,
            )
            write(rank.rank, kept.parameter, kept.target, kept.size, values)
    for rank in ranks:
        for one in rank.receives:
            assert one.peer != rank.rank, "a rank sends to itself"
            sent, values = on_the_way[one.peer, rank.rank].pop(0)
            assert (sent.parameter, sent.size) == (one.parameter, one.size)
            write(rank.rank, one.parameter, one.start, one.size, values)
    assert not any(on_the_way.values()), "something was sent that nobody takes"
    return target, written
