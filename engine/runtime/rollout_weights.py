"""The weights that a rollout engine decodes with: the trainer's own storage, or a resharded copy.

Where a rank's training weights are those that its rollout needs, both use one storage and
`refresh` does nothing. Otherwise `refresh` sends the slices that ranks lack, and nothing else
(`engine.parallel.reshard`). Any engine decodes with them; vLLM's are in `vllm_rollout_weights`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from engine.errors import ConfigError
from engine.models import adapter_parameters, has_adapters
from engine.parallel.exchange import Exchange
from engine.parallel.grouping import Grouping, grouping
from engine.parallel.layout import ModelShape
from engine.parallel.module_shards import gather_holdings, local_tensors
from engine.parallel.reshard import plan
from engine.parallel.sharding_specs import rollout_holdings
from engine.rollout.native.tp_shards import TPModelShard
from engine.rollout.protocol import RolloutEngine
from engine.runtime.sharded_model import ShardedModel


class RolloutWeights(ABC):
    """The weights that the rollout engine of this rank decodes with."""

    model: Any  # handed to the engine: a transformers model, or this rank's slices of one
    engine_options: dict[str, Any] = {}  # noqa: RUF012 (replaced, never changed) for the engine

    def sync_weights(self, engine: RolloutEngine, version: int) -> None:
        """Make `engine` serve the trainer's weights as policy `version`; all ranks call it."""
        self.refresh()
        engine.update_weights(self.model, version)

    def require_intact(self) -> None:  # noqa: B027 (most kinds can't be torn)
        """Raise RolloutError if an exchange failed midway: old and new weights are mixed."""

    @abstractmethod
    def refresh(self) -> None:
        """Update `model` to the trainer's weights; all ranks of the policy call it together."""


class SharedWeights(RolloutWeights):
    """The trainer's own storage: nothing is copied."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def refresh(self) -> None:
        """Nothing to do: an optimizer step changes this storage."""


class ReshardedWeights(RolloutWeights):
    """Buffers in the rollout's layout; an exchange sends what a rank lacks straight into them."""

    def __init__(self, sharded: ShardedModel, to: Grouping) -> None:
        self._sharded = sharded
        config: Any = sharded.module.config
        held = gather_holdings(sharded.module, rename=sharded.full_name)
        wanted = rollout_holdings(held.shapes, to, ModelShape.of(config), _dtype(sharded.module))
        own = plan(held, wanted).for_rank(sharded.ranks.rank)
        target: dict[str, Tensor]
        if to.tp == 1:
            place = next(sharded.module.parameters()).device
            self.model = _empty(config, _dtype(sharded.module)).to(place)
            target = {name: p.data for name, p in self.model.named_parameters()}
        else:
            device, dtype = next(sharded.module.parameters()).device, _dtype(sharded.module)
            target = {
                name: torch.empty(shape, dtype=dtype, device=device)
                for name, shape in own.target_shapes().items()
            }
        source = local_tensors(sharded.module, rename=sharded.full_name)
        self._exchange = Exchange(own, source, target)
        self.refresh()
        if to.tp > 1:
            index, group = _tp_group(to, sharded.ranks.rank)
            self.model = TPModelShard(config, target, group, index)

    def refresh(self) -> None:
        """Exchange the slices that ranks lack."""
        self.moved = self._exchange.run()

    def require_intact(self) -> None:
        self._exchange.require_intact()


class AdapterWeights(RolloutWeights):
    """A full copy of a sharded policy with adapters, to which only the adapters are sent."""

    def __init__(self, sharded: ShardedModel, copy: PreTrainedModel) -> None:
        self._sharded, self.model = sharded, copy
        self.refresh()

    def refresh(self) -> None:
        """Gather the adapters, which are small, and copy them in place."""
        own = adapter_parameters(self.model)
        with torch.no_grad():
            for name, whole in self._sharded.full_tensors():
                if name in own:
                    own[name].copy_(whole)


def mount(sharded: ShardedModel, tensor_parallel_size: int, copy: Any = None) -> RolloutWeights:
    """RolloutWeights a policy for rollout on groups of `tensor_parallel_size` ranks.

    `copy()` loads the policy anew, whole; it is called for a sharded policy with adapters only.
    Raises ConfigError where adapters would have to be cut.
    """
    layout, module = sharded.ranks.layout, sharded.module
    split = [axis for axis, size in layout.sizes.items() if size > 1 and axis != "dp"]
    if not split and tensor_parallel_size == 1:
        return SharedWeights(module)
    if has_adapters(module):
        if tensor_parallel_size > 1:
            raise ConfigError(
                f"rollout.tensor_parallel_size={tensor_parallel_size} with model.lora: native "
                "decodes adapters on whole models; set it to 1"
            )
        return AdapterWeights(sharded, copy())
    if split == ["tp"] and tensor_parallel_size == layout.tp:
        return SharedWeights(TPModelShard.from_dtensors(module))
    return ReshardedWeights(sharded, grouping(layout, tp=tensor_parallel_size))


def _tp_group(to: Grouping, rank: int) -> tuple[int, dist.ProcessGroup]:
    """This rank's slice and group of ranks that decode together; all ranks make all groups."""
    found: dist.ProcessGroup | None = None
    for members in to.tp_groups():
        group = dist.new_group(list(members), sort_ranks=False)  # slices are in this order
        if rank in members:
            found = group
    assert found is not None
    return to.place(rank).tp, found


def _empty(config: Any, dtype: torch.dtype) -> Any:
    """A whole model whose weights are still to be filled."""
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # else a tied head stays a parameter of its own, which no exchange fills
    return model.eval().requires_grad_(False)


def _dtype(module: nn.Module) -> torch.dtype:
    return next(p.dtype for p in module.parameters() if p.is_floating_point())
