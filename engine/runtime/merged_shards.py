"""A policy with adapters as native's tensor-parallel ranks decode it: shards of W + α/r · B·A.

The base is frozen: its shards are sent once, or are the trainer's own. Whenever the policy changes,
ranks gather the adapters, which are small, and each computes its own part of the merged matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.models.lora import ADAPTER
from engine.models.quantize import QuantizedLinear
from engine.parallel.boxes import Box
from engine.parallel.exchange import Exchange
from engine.parallel.layout import ModelShape
from engine.parallel.module_shards import gather_shard_map, local_tensors
from engine.parallel.reshard import plan_reshard
from engine.parallel.rollout_layout import RolloutLayout
from engine.parallel.sharding_specs import rollout_shard_map
from engine.runtime.sharded_model import ShardedModel


class MergedShards:
    """This rank's merged tensors, by the names of a model without adapters: `tensors`."""

    def __init__(self, sharded: ShardedModel, to: RolloutLayout, *, shared: bool) -> None:
        """All ranks of the policy call it together.

        `shared`: training and rollout have the same shards, so that the base needs no copy. Raises
        ConfigError for adapters that are not plain LoRA, and for a quantised base.
        """
        self._sharded = sharded
        self._scales = adapter_scales(sharded.module)
        own = local_tensors(sharded.module, rename=self._base_name)
        dtype = next(iter(own.values())).dtype
        stored = gather_shard_map(sharded.module, rename=self._base_name)
        shape = ModelShape.of(sharded.module.config)
        wanted = rollout_shard_map(stored.shapes, to, shape, dtype)
        rank = sharded.ranks.rank
        self._boxes: dict[str, Box] = {
            name: shard.box
            for name, parameter in wanted.parameters.items()
            for shard in parameter.shards
            if rank in shard.ranks
        }
        self._base = own
        if not shared:
            plan = plan_reshard(stored, wanted).for_rank(rank)
            device = next(iter(own.values())).device
            self._base = {
                name: torch.empty(size, dtype=dtype, device=device)
                for name, size in plan.target_shapes().items()
            }
            Exchange(plan, own, self._base).run()
        self.tensors = {
            name: torch.empty_like(tensor) if self._module(name) in self._scales else tensor
            for name, tensor in self._base.items()
        }
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge the newest adapters; all ranks of the policy call it together."""
        adapters = dict(self._sharded.full_tensors(lambda name: ".lora_" in name))
        for name, merged in self.tensors.items():
            module = self._module(name)
            if module not in self._scales:
                continue
            down, up = (adapters[f"{module}.{m}.{ADAPTER}.weight"] for m in ("lora_A", "lora_B"))
            (row, column), (rows, columns) = self._boxes[name].offset, self._boxes[name].size
            part = up[row : row + rows] @ down[:, column : column + columns]
            merged.copy_(self._base[name] + part * self._scales[module])

    def _base_name(self, name: str) -> str | None:
        """A parameter's name in the model without adapters; None for an adapter's."""
        return (
            None if ".lora_" in name else self._sharded.full_name(name).replace(".base_layer", "")
        )

    @staticmethod
    def _module(name: str) -> str:
        """The module of which `name` is the weight; empty for a bias."""
        return name.removesuffix(".weight") if name.endswith(".weight") else ""


@torch.no_grad()
def merged_tensors(
    sharded: ShardedModel, adapters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Each full tensor of the policy without adapters, W + α/r · B·A where it has one.

    All ranks iterate to the end together; `adapters` are all of them, in full.
    """
    scales = adapter_scales(sharded.module)
    module: Any = sharded.module
    transposed = bool(module.peft_config[ADAPTER].fan_in_fan_out)
    for name, tensor in sharded.full_tensors(lambda name: ".lora_" not in name):
        owner = name.removesuffix(".base_layer.weight")
        if owner != name:
            down, up = (adapters[f"{owner}.{m}.{ADAPTER}.weight"] for m in ("lora_A", "lora_B"))
            delta = (up @ down).T if transposed else up @ down
            tensor = (tensor + delta * scales[owner]).to(tensor.dtype)
        yield name.replace(".base_layer.", "."), tensor


def adapter_scales(module: nn.Module) -> dict[str, float]:
    """α/r of each adapted module of the whole policy; all ranks call it together."""
    found: dict[str, float] = {}
    for name, layer in module.named_modules():
        adapted: Any = layer
        if not hasattr(adapted, "base_layer"):
            continue
        if adapted.lora_variant or any(adapted.lora_bias.values()):
            raise ConfigError(
                f"the adapter on {name!r} is not plain LoRA, and ranks that decode together have "
                "parts of its matrix; set rollout.tensor_parallel_size to 1"
            )
        if isinstance(adapted.base_layer, QuantizedLinear):
            raise ConfigError(
                f"{name!r} is quantised (model.lora.quantize), and ranks can't have parts of it; "
                "set rollout.tensor_parallel_size to 1"
            )
        found[name] = float(adapted.scaling[ADAPTER])
    every = [found] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(every, found)
    return {name: scale for part in every for name, scale in part.items()}
