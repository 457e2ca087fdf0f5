"""Shards of the rollout tests' models, as tensor-parallel ranks have them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rollout_models import build
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.rollout.native import TPModelShard
from engine.rollout.protocol import SamplingParams

STOP = tuple(range(20, 26))
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


def model_of(family: str, **changes: Any) -> Any:
    """A model of the rollout tests, its configuration changed."""
    model: Any = build(family)
    if changes:
        model.config.update(changes)
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(model.config)
    return model


def local_shard(name: str, whole: Tensor, config: Any, index: int, size: int) -> Tensor:
    """Shard `index` of `size` of a parameter, a view of it."""
    module = name.split(".")[-2]
    if module in ("k_proj", "v_proj") and config.num_key_value_heads < size:
        shared = size // config.num_key_value_heads
        return whole.chunk(config.num_key_value_heads)[index // shared]
    if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        return whole.chunk(size)[index]
    if module in ("embed_tokens", "lm_head"):
        rows = -(-len(whole) // size)
        return whole[rows * index : rows * (index + 1)]
    if module in ("o_proj", "down_proj") and whole.dim() == 2:
        return whole.chunk(size, dim=1)[index]
    return whole


def local_shards(model: Any, index: int, size: int) -> dict[str, Tensor]:
    return {
        name: local_shard(name, p.data, model.config, index, size)
        for name, p in model.named_parameters()
    }


def tp_shard(model: Any) -> TPModelShard:
    group = dist.group.WORLD
    assert group is not None
    return TPModelShard(model.config, local_shards(model, dist.get_rank(), group.size()), group)
