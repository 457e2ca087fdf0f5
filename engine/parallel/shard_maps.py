"""Shard maps: which rank has which box of each parameter, and where in its storage. Pure values.

A box is an index range in every dimension of a full tensor. `module_shards` makes a shard map of a
module, `rollout_shard_map` one of a layout and sizes alone; `reshard` plans from one to another.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.errors import ConfigError
from engine.parallel.layout import ModelShape, RolloutLayout

Index = tuple[int, ...]  # one number per dimension


@dataclass(frozen=True, slots=True)
class Box:
    """The elements from `offset` up to `offset + size`, in each dimension.

    >>> Box((2, 0), (2, 8)).intersect(Box((3, 4), (9, 9)))
    Box(offset=(3, 4), size=(1, 4))
    """

    offset: Index  # e.g. (1536, 0)
    size: Index  # e.g. (768, 1536)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """Return the elements of both; None if there are none."""
        offset, size = [], []
        for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True):
            start = a if a > b else b
            length = min(a + m, b + n) - start
            if length <= 0:
                return None
            offset.append(start)
            size.append(length)
        return Box(tuple(offset), tuple(size))

    def subtract(self, other: Box) -> list[Box]:
        """Return the elements that are not in `other`, as boxes that don't overlap."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.elements else []
        pieces, rest = [], self
        for d, (start, length) in enumerate(zip(common.offset, common.size, strict=True)):
            first, stop = rest.offset[d], rest.offset[d] + rest.size[d]
            if start > first:
                pieces.append(rest.cut(d, first, start - first))
            if stop > start + length:
                pieces.append(rest.cut(d, start + length, stop - start - length))
            rest = rest.cut(d, start, length)
        return pieces

    def cut(self, dim: int, start: int, length: int) -> Box:
        """Return the same box but with this range in a dimension."""
        after = dim + 1
        offset = (*self.offset[:dim], start, *self.offset[after:])
        return Box(offset, (*self.size[:dim], length, *self.size[after:]))

    def start_in(self, outer: Box, at: Index) -> Index:
        """Find where this box begins in a storage that has `outer`'s first element at `at`."""
        return tuple(s + a - b for s, a, b in zip(at, self.offset, outer.offset, strict=True))


def chunk(box: Box, dim: int | None, parts: int, index: int) -> Box:
    """Take part `index` of `box` along `dim`, as torch.chunk does: the last are short or empty."""
    if dim is None or parts == 1 or not box.size:
        return box
    width = math.ceil(box.size[dim] / parts)
    start = min(index * width, box.size[dim])
    return box.cut(dim, box.offset[dim] + start, min(width, box.size[dim] - start))


def disjoint_boxes(
    holders: Iterable[tuple[Box, Iterable[int]]],
) -> list[tuple[Box, tuple[int, ...]]]:
    """Split boxes with holders into boxes that don't overlap, each with all its holders, sorted.

    >>> disjoint_boxes([(Box((0,), (4,)), [0]), (Box((2,), (2,)), [1])])
    [(Box(offset=(0,), size=(2,)), (0,)), (Box(offset=(2,), size=(2,)), (0, 1))]
    """
    same: dict[Box, set[int]] = {}
    for box, ranks in holders:
        if box.elements:
            same.setdefault(box, set()).update(ranks)
    finished: list[tuple[Box, set[int]]] = []
    active: list[tuple[Box, set[int]]] = []  # those that a later box, sorted by offset, may overlap
    for box in sorted(same, key=lambda b: (b.offset, b.size)):
        ranks, updated, uncovered = same[box], [], [box]
        for tile, holding in active:
            common = tile.intersect(box)
            if common is None:
                updated.append((tile, holding))
                continue
            updated.append((common, holding | ranks))
            updated.extend((part, holding) for part in tile.subtract(box))
            uncovered = [piece for part in uncovered for piece in part.subtract(common)]
        updated.extend((part, ranks) for part in uncovered)
        active = []
        for tile, holding in updated:
            ended = bool(tile.size) and tile.offset[0] + tile.size[0] <= box.offset[0]
            (finished if ended else active).append((tile, holding))
    ordered = sorted(finished + active, key=lambda pair: (pair[0].offset, pair[0].size))
    return [(tile, tuple(sorted(holding))) for tile, holding in ordered]


def flat_range(size: Index, start: int, stop: int) -> list[Box]:
    """Return the elements `start` to `stop` of a row-major walk through a box, as boxes in order.

    >>> [(b.offset, b.size) for b in flat_range((3, 4), 2, 9)]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if not size:
        return [Box((), ())]
    row = math.prod(size[1:])
    first, last = start // row, (stop - 1) // row
    if start == first * row and stop == (last + 1) * row:  # whole rows
        return [Box.whole(size).cut(0, first, last + 1 - first)]
    if first == last:
        inner = flat_range(size[1:], start - first * row, stop - first * row)
        return [Box((first, *box.offset), (1, *box.size)) for box in inner]
    head = (first + 1) * row if start % row else start
    tail = last * row if stop % row else stop
    spans = itertools.pairwise((start, head, tail, stop))
    return [box for span in spans for box in flat_range(size, *span)]


@dataclass(frozen=True, slots=True)
class Shard:
    """A box that these ranks store; its first element is at index `start` of each one's tensor."""

    box: Box
    start: Index  # e.g. (1536, 0): the keys' rows in a fused matrix begin below the queries'
    ranks: tuple[int, ...]  # e.g. (0, 4)


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter over all ranks. A rank may have several of `shards`, or none."""

    shape: Index  # of the whole parameter, e.g. (1536, 1536)
    storage: str  # name of the tensor that it lies in, on every rank
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class ShardMap:
    """The parameters over all ranks, by their names in the whole model."""

    world_size: int
    parameters: Mapping[str, ShardedParameter]
    dtypes: Mapping[str, torch.dtype] = field(repr=False)  # of each parameter in its storage
    hosts: tuple[str, ...] = ()  # the machine of each rank, where it is known

    def __post_init__(self) -> None:
        shards = (shard for parameter in self.parameters.values() for shard in parameter.shards)
        last = max((rank for shard in shards for rank in shard.ranks), default=0)
        if last >= self.world_size:
            raise ConfigError(
                f"rank {last} holds parameters, but there are {self.world_size} ranks; give the "
                "world size of all ranks that take part"
            )

    @property
    def shapes(self) -> dict[str, Index]:  # of the full parameters
        return {name: parameter.shape for name, parameter in self.parameters.items()}


ROLLOUT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose shards `native` decodes with

Shapes = Mapping[str, Index]
Stages = Sequence[Sequence[int]]

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_HEADS = ("q_proj", "k_proj", "v_proj")  # one block of rows a head
_ROWS = (*_HEADS, "gate_proj", "up_proj", "embed_tokens", "lm_head")
_COLUMNS = ("o_proj", "down_proj")
_VOCABULARY = ("embed_tokens", "lm_head")
_FUSED = {"qkv_proj": _HEADS, "gate_up_proj": ("gate_proj", "up_proj")}  # in vLLM, in this order


def rollout_shard_map(
    shapes: Shapes,
    layout: RolloutLayout,
    model: ModelShape,
    dtype: torch.dtype,
    stages: Stages | None = None,
    fused: bool = False,
) -> ShardMap:
    """Return the shards that rollout ranks need: full layers of their stage, split by `layout.tp`.

    stages: each rollout stage's layers. fused: as vLLM stores them, with the rows of q, k and v in
    one tensor, those of gate and up in another, and a vocabulary rounded up to 64 (rows beyond it
    stay as they are). A key head is on several ranks where there are more ranks than key heads.
    Raises ConfigError where names or sizes do not fit.
    """
    _check_rollout(layout, model)
    stages = [range(model.layers)] if stages is None else stages
    if len(stages) != layout.pp or sorted(n for s in stages for n in s) != [*range(model.layers)]:
        raise ConfigError(
            f"stages {[list(stage) for stage in stages]} are not {model.layers} layers over "
            f"{layout.pp} stages; give each layer to one stage"
        )
    stages_by_name = _find_stages(shapes, stages, model.tied)
    coordinates = [layout.place(rank) for rank in range(layout.world_size)]
    cache: dict[tuple[object, ...], tuple[Shard, ...]] = {}

    def local_part(module: str, shape: Index, dim: int | None, tp: int) -> Box:
        full = Box.whole(shape)
        if module in _VOCABULARY:
            unit = 64 if fused else 1  # vLLM rounds the vocabulary up to a multiple of it
            width = math.ceil(math.ceil(shape[0] / unit) * unit / layout.tp)
            start = min(tp * width, shape[0])
            return full.cut(0, start, min(width, shape[0] - start))
        if module in ("k_proj", "v_proj") and layout.tp > model.kv_heads:
            return chunk(full, 0, model.kv_heads, tp * model.kv_heads // layout.tp)
        return chunk(full, dim, layout.tp, tp)

    def find_shards(name: str, shape: Index) -> tuple[Shard, ...]:
        module, dim = _module_name(name), split_dim(name, shape, layout.tp)
        above = _fused(name)[1] if fused else ()
        parts_above = tuple((part, shapes[name.replace(module, part)]) for part in above)
        key = (module, shape, dim, parts_above, stages_by_name[name])
        if key not in cache:
            ranks_by_box: dict[tuple[Box, int], list[int]] = defaultdict(list)
            for rank, coordinate in enumerate(coordinates):
                if coordinate.pp not in stages_by_name[name]:
                    continue
                box = local_part(module, shape, dim, coordinate.tp)
                rows_above = [local_part(m, s, 0, coordinate.tp).size[0] for m, s in parts_above]
                if box.elements:
                    ranks_by_box[box, sum(rows_above)].append(rank)
            zeros = (0,) * (len(shape) - 1)
            cache[key] = tuple(
                Shard(box, (row, *zeros) if shape else (), tuple(r))
                for (box, row), r in ranks_by_box.items()
            )
        return cache[key]

    parameters = {
        name: ShardedParameter(shape, _fused(name)[0] if fused else name, find_shards(name, shape))
        for name, shape in shapes.items()
    }
    return ShardMap(layout.world_size, parameters, dict.fromkeys(shapes, dtype))


def split_dim(name: str, shape: Index, tp: int) -> int | None:
    """Return the dimension that tensor parallelism splits; None for what its ranks replicate."""
    module = _module_name(name)
    if module in _ROWS:
        return 0
    if module in _COLUMNS:
        return 1 if len(shape) > 1 else None  # their biases are added once, after the sum
    if tp > 1 and len(shape) > 1:
        raise ConfigError(
            f"parameter {name!r} {list(shape)} has no tensor parallel rule; use tp=1 for this model"
        )
    return None


def _module_name(name: str) -> str:
    """Return the module's own name, e.g. "q_proj" of "model.layers.0.self_attn.q_proj.weight"."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 else name


def _fused(name: str) -> tuple[str, tuple[str, ...]]:
    """Return vLLM's tensor with a parameter, and the parts that lie above the parameter in it."""
    module = _module_name(name)
    for fused, parts in _FUSED.items():
        if module in parts:
            return name.replace(module, fused), parts[: parts.index(module)]
    return name, ()


def _find_stages(shapes: Iterable[str], stages: Stages, tied: bool) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each parameter."""
    stage_by_layer = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    last = len(stages) - 1
    stages_by_name: dict[str, tuple[int, ...]] = {}
    for name in shapes:
        layer = _LAYER.search(name)
        if layer is None:
            ends = {0, last} if tied else {0}
            embedding = _module_name(name) == "embed_tokens"
            stages_by_name[name] = tuple(sorted(ends)) if embedding else (last,)
        elif int(layer[1]) in stage_by_layer:
            stages_by_name[name] = (stage_by_layer[int(layer[1])],)
        else:
            raise ConfigError(
                f"parameter {name!r} is of layer {layer[1]}, but the stages have "
                f"{len(stage_by_layer)} layers; give the model's own configuration"
            )
    return stages_by_name


def _check_rollout(layout: RolloutLayout, model: ModelShape) -> None:
    tp, kv = layout.tp, model.kv_heads
    for what, count in (("attention heads", model.heads), ("MLP rows", model.intermediate)):
        if count % tp:
            raise ConfigError(
                f"rollout tp={tp} does not divide the model's {count} {what}; choose a divisor"
            )
    if kv % tp and tp % kv:
        raise ConfigError(
            f"rollout tp={tp} neither divides the model's {kv} key heads nor is a multiple of "
            "them; choose another tp"
        )
