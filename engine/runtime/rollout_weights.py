"""The weights that a rollout engine decodes with: the trainer's own storage, or a resharded copy.

Only the boxes that ranks lack are exchanged (`engine.parallel.reshard`), into buffers of the
rollout's layout or into vLLM's own parameters. `rollout_weights` chooses.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from engine.config import RolloutConfig
from engine.errors import ConfigError
from engine.models import adapter_parameters, has_adapters
from engine.models.lora import ADAPTER
from engine.models.quantize import QuantizedLinear
from engine.parallel.exchange import Exchange
from engine.parallel.layout import ModelShape, RolloutLayout, rollout_layout
from engine.parallel.module_shards import gather_shard_map, local_tensors
from engine.parallel.reshard import plan_reshard
from engine.parallel.shard_maps import ROLLOUT_FAMILIES, Box, rollout_shard_map
from engine.rollout.native.decoding_weights import TPModelShard
from engine.rollout.protocol import RolloutEngine, engine_capabilities
from engine.runtime.apply_layout import floating_dtype
from engine.runtime.sharded_model import ShardedModel
from engine.storage.weight_files import file_tensors


@torch.no_grad()
def merged_tensors(
    sharded: ShardedModel, adapters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Each full tensor of the policy, W + α/r · B·A where it has adapters; all ranks iterate."""
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
    scales: dict[str, float] = {}
    for name, adapted in module.named_modules():
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
        scales[name] = float(adapted.scaling[ADAPTER])
    by_rank = [scales] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(by_rank, scales)
    return {name: scale for part in by_rank for name, scale in part.items()}


LoadModel = Callable[[], PreTrainedModel]


@runtime_checkable
class VllmRanks(RolloutEngine, Protocol):
    """vLLM, whose parameters can be written in place or filled tensor by tensor."""

    @property
    def dtype(self) -> torch.dtype: ...

    def parameters(self) -> dict[str, Tensor]: ...

    def begin_update(self, version: int) -> None: ...

    def finish_update(self, version: int) -> None: ...

    def update_from(self, named: Iterable[tuple[str, Tensor]], version: int) -> None: ...


class RolloutWeights:
    """The weights that the rollout engine of this rank decodes with."""

    model: Any  # given to the engine: a transformers model, or this rank's shard of one
    engine_options: dict[str, object] = {}  # noqa: RUF012 (replaced, never changed)
    received_bytes = 0  # from other ranks in the latest refresh

    def sync_weights(self, engine: RolloutEngine, version: int) -> None:
        """Let `engine` serve the trainer's weights as policy `version`; all ranks call it."""
        self.refresh()
        engine.update_weights(self.model, version)

    def require_intact(self) -> None:
        """Raise RolloutError if an exchange failed midway: old and new weights are mixed."""

    def refresh(self) -> None:
        """Update `model` to the trainer's weights; all ranks of the policy call it together."""


class SharedWeights(RolloutWeights):
    """The trainer's own storage: nothing is copied."""

    def __init__(self, model: nn.Module | TPModelShard) -> None:
        self.model = model


class ReshardedWeights(RolloutWeights):
    """Buffers in the rollout's layout; an exchange fills what a rank lacks."""

    def __init__(self, sharded: ShardedModel, to: RolloutLayout) -> None:
        module, config, rank = sharded.module, sharded.module.config, sharded.ranks.rank
        device, dtype = next(module.parameters()).device, floating_dtype(module)
        stored = gather_shard_map(module, rename=sharded.full_name)
        target_map = rollout_shard_map(stored.shapes, to, ModelShape.of(config), dtype)
        own = plan_reshard(stored, target_map).for_rank(rank)
        if to.tp == 1:
            self.model = _empty_model(config, dtype, device)
            target = {name: p.data for name, p in self.model.named_parameters()}
        else:
            target = _buffers(own.target_shapes(), dtype, device)
        self._sharded = sharded
        self._exchange = Exchange(own, local_tensors(module, rename=sharded.full_name), target)
        self.refresh()
        if to.tp > 1:
            index, group = _tp_group(to, rank)
            self.model = TPModelShard(config, target, group, index)

    def refresh(self) -> None:
        with self._sharded.on_device():
            self.received_bytes = self._exchange.run().received

    def require_intact(self) -> None:
        self._exchange.require_intact()


class AdapterWeights(RolloutWeights):
    """A full copy of a sharded policy with adapters, to which only the adapters are sent."""

    def __init__(self, sharded: ShardedModel, model: PreTrainedModel) -> None:
        self._sharded, self.model = sharded, model
        self.refresh()

    def refresh(self) -> None:
        parameters = adapter_parameters(self.model)
        with torch.no_grad():
            for name, full in self._sharded.full_tensors(parameters.__contains__):
                parameters[name].copy_(full)


class MergedWeights(RolloutWeights):
    """A policy with adapters as tensor-parallel ranks decode it: shards of W + α/r · B·A.

    At each refresh ranks gather the adapters, which are small, and merge their own part of them.
    """

    def __init__(self, sharded: ShardedModel, to: RolloutLayout, *, shared: bool) -> None:
        """`shared`: training and rollout have the same shards, so that the base needs no copy.

        Raises ConfigError for adapters that are not plain LoRA, and for a quantised base.
        """
        self._sharded, rank = sharded, sharded.ranks.rank
        self._scales = adapter_scales(sharded.module)
        own = local_tensors(sharded.module, rename=self._base_name)
        first = next(iter(own.values()))
        stored = gather_shard_map(sharded.module, rename=self._base_name)
        shape = ModelShape.of(sharded.module.config)
        target_map = rollout_shard_map(stored.shapes, to, shape, first.dtype)
        self._boxes: dict[str, Box] = {
            name: shard.box
            for name, parameter in target_map.parameters.items()
            for shard in parameter.shards
            if rank in shard.ranks
        }
        self._base = own
        if not shared:
            plan = plan_reshard(stored, target_map).for_rank(rank)
            self._base = _buffers(plan.target_shapes(), first.dtype, first.device)
            with sharded.on_device():
                Exchange(plan, own, self._base).run()
        self._tensors = {
            name: torch.empty_like(tensor) if self._module(name) in self._scales else tensor
            for name, tensor in self._base.items()
        }
        self.refresh()
        index, group = _tp_group(to, rank)
        self.model = TPModelShard(sharded.module.config, self._tensors, group, index)

    @torch.no_grad()
    def refresh(self) -> None:
        adapters = dict(self._sharded.full_tensors(lambda name: ".lora_" in name))
        for name, merged in self._tensors.items():
            module = self._module(name)
            if module not in self._scales:
                continue
            down, up = (adapters[f"{module}.{m}.{ADAPTER}.weight"] for m in ("lora_A", "lora_B"))
            (row, column), (rows, columns) = self._boxes[name].offset, self._boxes[name].size
            part = up[row : row + rows] @ down[:, column : column + columns]
            merged.copy_(self._base[name] + part * self._scales[module])

    def _base_name(self, name: str) -> str | None:
        """A parameter's name in the model without adapters; None for an adapter's."""
        full_name = self._sharded.full_name(name)
        return None if ".lora_" in name else full_name.replace(".base_layer", "")

    @staticmethod
    def _module(name: str) -> str:
        """The module of which `name` is the weight; empty for a bias."""
        return name.removesuffix(".weight") if name.endswith(".weight") else ""


class VllmWeights(RolloutWeights):
    """vLLM over the policy's ranks; an exchange fills its parameters in place."""

    def __init__(self, sharded: ShardedModel, to: RolloutLayout) -> None:
        self._sharded, self._to = sharded, to
        self._exchange: Exchange | None = None
        self.model = _meta_model(sharded)
        self.engine_options = {"rank_groups": to.tp_groups(), "load": False}

    def sync_weights(self, engine: RolloutEngine, version: int) -> None:
        assert isinstance(engine, VllmRanks)
        if self._exchange is None:
            self._exchange = self._plan(engine)
        engine.begin_update(version)
        with self._sharded.on_device():
            self.received_bytes = self._exchange.run().received
        engine.finish_update(version)

    def require_intact(self) -> None:
        if self._exchange is not None:
            self._exchange.require_intact()

    def _plan(self, engine: VllmRanks) -> Exchange:
        sharded, module = self._sharded, self._sharded.module
        stored = gather_shard_map(module, rename=sharded.full_name)
        shape = ModelShape.of(self.model.config)
        target_map = rollout_shard_map(stored.shapes, self._to, shape, engine.dtype, fused=True)
        plan = plan_reshard(stored, target_map).for_rank(sharded.ranks.rank)
        source = local_tensors(module, rename=sharded.full_name)
        return Exchange(plan, source, engine.parameters())


class StreamedWeights(RolloutWeights):
    """vLLM in processes of its own, or that quantises: loads full tensors, gathered one by one."""

    def __init__(self, sharded: ShardedModel, to: RolloutLayout | None = None) -> None:
        self._sharded = sharded
        self.model = _meta_model(sharded)
        self.engine_options = {"load": False}
        if to is not None:
            self.engine_options["rank_groups"] = to.tp_groups()

    def sync_weights(self, engine: RolloutEngine, version: int) -> None:
        assert isinstance(engine, VllmRanks)
        kind = self.model.config.model_type
        engine.update_from(file_tensors(kind, self._sharded.full_tensors()), version)


def rollout_weights(
    sharded: ShardedModel, config: RolloutConfig, load: LoadModel
) -> RolloutWeights:
    """A policy's weights for the engine of `config`, on groups of `tensor_parallel_size` ranks.

    `load()` loads the full policy; it is called for a sharded policy with adapters only. Raises
    ConfigError where the engine would need shards that it can't decode with.
    """
    if engine_capabilities(config).loads_shards:
        return _vllm_weights(sharded, config, load)
    return _model_weights(sharded, config.tensor_parallel_size, load)


def _model_weights(sharded: ShardedModel, tp: int, load: LoadModel) -> RolloutWeights:
    """The weights for an engine that takes a model, or a rank's shard of one."""
    layout, module = sharded.ranks.layout, sharded.module
    split = [axis for axis, size in layout.sizes.items() if size > 1 and axis != "dp"]
    if not split and tp == 1:
        return SharedWeights(module)
    config = module.config
    if tp > 1 and config.model_type not in ROLLOUT_FAMILIES:
        raise ConfigError(
            f"rollout.tensor_parallel_size={tp} with a model of type {config.model_type!r}: native "
            f"decodes shards of {', '.join(ROLLOUT_FAMILIES)} models; set it to 1, or use vllm"
        )
    same = split == ["tp"] and tp == layout.tp and ModelShape.of(config).kv_heads % tp == 0
    if has_adapters(module) and tp > 1:
        return MergedWeights(sharded, rollout_layout(layout, tp=tp), shared=same)
    if has_adapters(module):
        return AdapterWeights(sharded, load())
    if same:
        return SharedWeights(TPModelShard.from_dtensors(module))
    return ReshardedWeights(sharded, rollout_layout(layout, tp=tp))


def _vllm_weights(sharded: ShardedModel, config: RolloutConfig, load: LoadModel) -> RolloutWeights:
    layout, tp = sharded.ranks.layout, config.tensor_parallel_size
    full = all(size == 1 for axis, size in layout.sizes.items() if axis != "dp")
    if full and (tp == 1 or not config.vllm.in_process):
        return SharedWeights(sharded.module)
    if has_adapters(sharded.module):
        weights = AdapterWeights(sharded, load())
        if config.vllm.in_process and tp > 1:
            weights.engine_options = {"rank_groups": rollout_layout(layout, tp=tp).tp_groups()}
        return weights
    if not config.vllm.in_process:
        return StreamedWeights(sharded)
    to = rollout_layout(layout, tp=tp)
    model_config = sharded.module.config
    exchanged = model_config.model_type in ROLLOUT_FAMILIES and not config.vllm.quantization
    return VllmWeights(sharded, to) if exchanged else StreamedWeights(sharded, to)


def _tp_group(to: RolloutLayout, rank: int) -> tuple[int, dist.ProcessGroup]:
    """This rank's index in, and the group of, the ranks that decode together."""
    # All ranks create all groups; shards are in the order of the members.
    groups = {tuple(m): dist.new_group(list(m), sort_ranks=False) for m in to.tp_groups()}
    [own_group] = [group for members, group in groups.items() if rank in members]
    return to.place(rank).tp, own_group


def _buffers(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    return {name: torch.empty(s, dtype=dtype, device=device) for name, s in shapes.items()}


def _empty_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()  # else a tied head stays a parameter of its own, which no exchange fills
    return model.eval().requires_grad_(False).to(device)


def _meta_model(sharded: ShardedModel) -> PreTrainedModel:
    config, dtype = copy.deepcopy(sharded.module.config), floating_dtype(sharded.module)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
