"""How rollout shards a model's parameters: a shard map from sizes alone, without a model or ranks.

Names are those of transformers' Llama, Mistral, Qwen2 and Qwen3 models. A tied head is not a
parameter of its own: "…embed_tokens.weight" is on the first stage and on the last. The shard map
of a real module is `module_shards`'.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from engine.errors import ConfigError
from engine.parallel.boxes import Box, Index, chunk
from engine.parallel.layout import ModelShape
from engine.parallel.rollout_layout import RolloutLayout
from engine.parallel.shard_map import Shard, ShardedParameter, ShardMap

ROLLOUT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose shards `native` decodes with

Shapes = Mapping[str, Index]
Stages = Sequence[Sequence[int]]

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_HEADS = ("q_proj", "k_proj", "v_proj")  # one block of rows a head
_ROWS = (*_HEADS, "gate_proj", "up_proj", "embed_tokens", "lm_head")
_COLUMNS = ("o_proj", "down_proj")
_VOCABULARY = ("embed_tokens", "lm_head")
_FUSED = {"qkv_proj": _HEADS, "gate_up_proj": ("gate_proj", "up_proj")}  # in vLLM, in this order
_VLLM_PADDING = 64  # vLLM rounds the vocabulary up to a multiple of it


def rollout_shard_map(
    shapes: Shapes,
    layout: RolloutLayout,
    model: ModelShape,
    dtype: torch.dtype,
    stages: Stages | None = None,
    fused: bool = False,
) -> ShardMap:
    """The shards that rollout ranks need: full layers of their stage, split by `layout.tp`.

    stages: each rollout stage's layers. fused: as vLLM stores them, with the rows of q, k and v in
    one tensor, those of gate and up in another, and the vocabulary rounded up to 64 above it is
    split (rows beyond it have no source and stay as they are). A key head is on several ranks where
    there are more ranks than key heads. Raises ConfigError where names or sizes do not fit.
    """
    _check_rollout(layout, model)
    stage_of = _stage_of(shapes, _checked(stages, layout.pp, model.layers), model.tied)
    places = [layout.place(rank) for rank in range(layout.world_size)]
    known: dict[tuple[object, ...], tuple[Shard, ...]] = {}

    def local_part(module: str, shape: Index, dim: int | None, tp: int) -> Box:
        whole = Box.whole(shape)
        if module in _VOCABULARY:
            unit = _VLLM_PADDING if fused else 1
            width = math.ceil(math.ceil(shape[0] / unit) * unit / layout.tp)
            return _rows(whole, tp * width, width)
        if module in ("k_proj", "v_proj") and layout.tp > model.kv_heads:
            return chunk(whole, 0, model.kv_heads, tp * model.kv_heads // layout.tp)
        return chunk(whole, dim, layout.tp, tp)

    def shards_of(name: str, shape: Index) -> tuple[Shard, ...]:
        module, dim = _module_name(name), split_dim(name, shape, layout.tp)
        above = _above(name, shapes) if fused else ()
        key = (module, shape, dim, above, stage_of[name])
        if key not in known:
            found: dict[tuple[Box, int], list[int]] = defaultdict(list)
            for rank, place in enumerate(places):
                if place.pp not in stage_of[name]:
                    continue
                box = local_part(module, shape, dim, place.tp)
                rows_above = [local_part(m, s, 0, place.tp).size[0] for m, s in above]
                if box.elements:
                    found[box, sum(rows_above)].append(rank)
            rest = (0,) * (len(shape) - 1)
            known[key] = tuple(
                Shard(box, (row, *rest) if shape else (), tuple(r))
                for (box, row), r in found.items()
            )
        return known[key]

    parameters = {
        name: ShardedParameter(shape, _fused_name(name) if fused else name, shards_of(name, shape))
        for name, shape in shapes.items()
    }
    return ShardMap(layout.world_size, parameters, dict.fromkeys(shapes, dtype))


def split_dim(name: str, shape: Index, tp: int) -> int | None:
    """The dimension that tensor parallelism splits; None for what its ranks replicate."""
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
    """The module's own name, e.g. "q_proj" of "model.layers.0.self_attn.q_proj.weight"."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 else name


def _above(name: str, shapes: Shapes) -> tuple[tuple[str, Index], ...]:
    """Name and shape of each part that lies above a parameter in vLLM's fused tensor."""
    module = _module_name(name)
    for parts in _FUSED.values():
        if module in parts:
            names = parts[: parts.index(module)]
            return tuple((part, shapes[name.replace(module, part)]) for part in names)
    return ()


def _fused_name(name: str) -> str:
    module = _module_name(name)
    for whole, parts in _FUSED.items():
        if module in parts:
            return name.replace(module, whole)
    return name


def _rows(box: Box, start: int, count: int) -> Box:
    start = min(start, box.size[0])
    return Box((start, *box.offset[1:]), (min(count, box.size[0] - start), *box.size[1:]))


def _checked(stages: Stages | None, count: int, layers: int) -> Stages:
    stages = [range(layers)] if stages is None else stages
    if len(stages) != count or sorted(n for stage in stages for n in stage) != list(range(layers)):
        raise ConfigError(
            f"stages {[list(stage) for stage in stages]} are not {layers} layers over {count} "
            "stages; give each layer to one stage"
        )
    return stages


def _stage_of(shapes: Iterable[str], stages: Stages, tied: bool) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter."""
    of_layer = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    last = len(stages) - 1
    found: dict[str, tuple[int, ...]] = {}
    for name in shapes:
        layer = _LAYER.search(name)
        if layer is None:
            first = _module_name(name) == "embed_tokens"
            found[name] = (0,) if first and not (tied and last) else (0, last) if first else (last,)
        elif int(layer[1]) in of_layer:
            found[name] = (of_layer[int(layer[1])],)
        else:
            raise ConfigError(
                f"parameter {name!r} is of layer {layer[1]}, but the stages have {len(of_layer)} "
                "layers; give the model's own configuration"
            )
    return found


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
