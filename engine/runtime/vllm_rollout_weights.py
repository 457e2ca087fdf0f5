"""A spread policy on vLLM: each rank's slices go straight into vLLM's own parameters.

Policies that one rank holds whole, and other engines, are `mounted`'s.
"""

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
from engine.runtime.rollout_weights import Mount, Shared, WithAdapters
from engine.runtime.sharded_model import SpreadModel


class IntoVllm(Mount):
    """vLLM over the policy's ranks; an exchange writes what a rank lacks into its parameters."""

    def __init__(self, spread: SpreadModel, to: Grouping) -> None:
        self._spread, self._to = spread, to
        self._exchange: Exchange | None = None
        self.model = _shape_of(spread)
        self.engine_options = {"rank_groups": to.tp_groups(), "load": False}

    def bring(self, engine: Any, version: int) -> None:
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
        spread, module = self._spread, self._spread.module
        held = gather_holdings(module, rename=spread.whole_name)
        shape = ModelShape.of(self.model.config)
        wanted = rollout_holdings(held.shapes, self._to, shape, engine.dtype, fused=True)
        own = plan(held, wanted).for_rank(spread.ranks.rank)
        source = local_tensors(module, rename=spread.whole_name)
        return Exchange(own, source, engine.storages())


class Streamed(Mount):
    """vLLM in processes of its own: whole tensors are gathered one by one, and sent on."""

    def __init__(self, spread: SpreadModel) -> None:
        self._spread = spread
        self.model = _shape_of(spread)
        self.engine_options = {"load": False}

    def bring(self, engine: Any, version: int) -> None:
        """All ranks of the policy call it together."""
        engine.update_from(self._spread.whole_tensors(), version)

    def refresh(self) -> None:
        """Nothing: tensors are gathered when they are sent."""


def mount_vllm(
    spread: SpreadModel, config: RolloutConfig, load: Callable[[], PreTrainedModel]
) -> Mount:
    """Mount a policy for vLLM; `load()` makes it anew, whole, if it is spread and has adapters."""
    layout, tp = spread.ranks.layout, config.tensor_parallel_size
    whole = all(size == 1 for axis, size in layout.sizes.items() if axis != "dp")
    if whole and (tp == 1 or not config.vllm.in_process):
        return Shared(spread.module)
    if has_adapters(spread.module):
        mounted = WithAdapters(spread, load())
        if config.vllm.in_process and tp > 1:
            mounted.engine_options = {"rank_groups": grouping(layout, tp=tp).tp_groups()}
        return mounted
    if not config.vllm.in_process:
        return Streamed(spread)
    return IntoVllm(spread, grouping(layout, tp=tp))


def _shape_of(spread: SpreadModel) -> PreTrainedModel:
    """A model that has the policy's configuration and dtype, and no storage."""
    module: Any = spread.module
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(module.config), dtype=dtype
        )
    return model
