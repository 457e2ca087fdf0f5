"""A sharded policy on vLLM: each rank's slices go straight into vLLM's own parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.config import RolloutConfig
from engine.models import has_adapters
from engine.parallel.exchange import Exchange
from engine.parallel.grouping import Grouping, grouping
from engine.parallel.layout import ModelShape
from engine.parallel.module_shards import gather_holdings, local_tensors
from engine.parallel.reshard import plan
from engine.parallel.sharding_specs import rollout_holdings
from engine.runtime.rollout_weights import AdapterWeights, RolloutWeights, SharedWeights
from engine.runtime.sharded_model import ShardedModel


class VllmWeights(RolloutWeights):
    """vLLM over the policy's ranks; an exchange writes what a rank lacks into its parameters."""

    def __init__(self, sharded: ShardedModel, to: Grouping) -> None:
        self._sharded, self._to = sharded, to
        self._exchange: Exchange | None = None
        self.model = _shape_of(sharded)
        self.engine_options = {"rank_groups": to.tp_groups(), "load": False}

    def sync_weights(self, engine: Any, version: int) -> None:
        """Exchange slices; a failure on the way leaves the engine refusing to serve."""
        if self._exchange is None:
            self._exchange = self._plan(engine)
        engine.begin_update(version)
        self.moved = self._exchange.run()
        engine.weights_written(version)

    def require_intact(self) -> None:
        if self._exchange is not None:
            self._exchange.require_intact()

    def refresh(self) -> None:
        """Nothing: there is nothing between the trainer's storage and the engine's."""

    def _plan(self, engine: Any) -> Exchange:
        sharded, module = self._sharded, self._sharded.module
        held = gather_holdings(module, rename=sharded.full_name)
        shape = ModelShape.of(self.model.config)
        wanted = rollout_holdings(held.shapes, self._to, shape, engine.dtype, fused=True)
        own = plan(held, wanted).for_rank(sharded.ranks.rank)
        source = local_tensors(module, rename=sharded.full_name)
        return Exchange(own, source, engine.storages())


class StreamedWeights(RolloutWeights):
    """vLLM in processes of its own: whole tensors are gathered one by one, and sent on."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self.model = _shape_of(sharded)
        self.engine_options = {"load": False}

    def sync_weights(self, engine: Any, version: int) -> None:
        """All ranks of the policy call it together."""
        engine.update_from(self._sharded.full_tensors(), version)

    def refresh(self) -> None:
        """Nothing: tensors are gathered when they are sent."""


def vllm_rollout_weights(
    sharded: ShardedModel, config: RolloutConfig, load: Callable[[], PreTrainedModel]
) -> RolloutWeights:
    """Rollout weights for vLLM; `load()` loads the full policy, for a sharded one with adapters."""
    layout, tp = sharded.ranks.layout, config.tensor_parallel_size
    whole = all(size == 1 for axis, size in layout.sizes.items() if axis != "dp")
    if whole and (tp == 1 or not config.vllm.in_process):
        return SharedWeights(sharded.module)
    if has_adapters(sharded.module):
        rollout_weights = AdapterWeights(sharded, load())
        if config.vllm.in_process and tp > 1:
            rollout_weights.engine_options = {"rank_groups": grouping(layout, tp=tp).tp_groups()}
        return rollout_weights
    if not config.vllm.in_process:
        return StreamedWeights(sharded)
    return VllmWeights(sharded, grouping(layout, tp=tp))


def _shape_of(sharded: ShardedModel) -> PreTrainedModel:
    """A model that has the policy's configuration and dtype, and no storage."""
    module: Any = sharded.module
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(module.config), dtype=dtype
        )
    return model
