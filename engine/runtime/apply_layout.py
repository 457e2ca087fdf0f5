"""A model laid out over a role's ranks: this rank's module, sharded, with its storage.

`engine.parallel` has the axes; here is the order in which they are applied, and when weights that
are still in files are read.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.config import ParallelConfig
from engine.models.critic import CriticModel
from engine.models.fused import apply_fused, gains_by_fusion
from engine.models.packing import packing_of, set_packing
from engine.models.unloaded import UnloadedModel
from engine.models.vocabulary_head import require_vocabulary_head
from engine.parallel import fsdp
from engine.parallel import pipeline_stages as stages
from engine.parallel.process_groups import Ranks
from engine.parallel.sequence_parallel import apply_ulysses
from engine.parallel.tensor_parallel import apply_tensor_parallel
from engine.runtime.load_shards import load_shards
from engine.runtime.packed_passes import allow_packing

ModelPart = PreTrainedModel | CriticModel | stages.PipelineStage  # what one rank trains


def apply_layout(
    model: nn.Module | UnloadedModel, ranks: Ranks, config: ParallelConfig, device: torch.device
) -> ModelPart:
    """Shard `model` in place and return this rank's module of it, on `device`.

    Every rank passes the same one: whole, on `device` already, or unloaded, of which each reads
    what it keeps.
    """
    unloaded = model if isinstance(model, UnloadedModel) else None
    module = cast(ModelPart, model if unloaded is None else unloaded.module)
    if ranks.size("sp") > 1 and not isinstance(module, CriticModel):
        require_vocabulary_head(module)
    allow_packing(module, ranks, config, device)
    shards = fsdp.shards_weights(ranks)
    whole = ranks.size("tp") == 1 and not shards
    if ranks.size("pp") > 1:
        packing = packing_of(module)
        module = stages.extract_stage(module, ranks.index("pp"), ranks.size("pp"))
        set_packing(module, packing)
    if unloaded is not None and whole:
        load_shards(module, unloaded, device, device)
    if whole and gains_by_fusion(floating_dtype(module)):
        apply_fused(module)
    layers = decoder_layers(module) if shards or config.activation_checkpointing else []
    if ranks.size("tp") > 1:
        apply_tensor_parallel(
            module, ranks.submesh("tp"), sequence_parallel=config.sequence_parallel
        )
    if config.activation_checkpointing:
        fsdp.checkpoint_activations(layers)
    apply_ulysses(module, ranks)
    fsdp.shard_model(module, ranks, config, layers=layers)
    if unloaded is not None and not whole:
        offloaded = shards and config.offload_params
        load_shards(module, unloaded, device, torch.device("cpu") if offloaded else device)
    return module


def decoder_layers(module: ModelPart) -> list[nn.Module]:
    """The repeated layers of a model, a critic or a stage, in order."""
    if isinstance(module, stages.PipelineStage):
        return module.layers
    body: Any = module.base_model
    count = body.config.get_text_config().num_hidden_layers
    found = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return list(found[0]) if found else []


def floating_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of a module's weights."""
    return next(p.dtype for p in module.parameters() if p.is_floating_point())
