"""A model is laid out over a role's ranks: sharded, loaded into its shards, and checked."""

import logging
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.batch import TOKENS, Batch
from engine.config import ParallelConfig
from engine.errors import ConfigError
from engine.models.fused import apply_fused, gains_by_fusion
from engine.models.packing import apply_packing, packing_of, set_packing
from engine.models.policy import UnloadedModel
from engine.models.value_head import CriticModel
from engine.models.vocabulary_head import require_vocabulary_head
from engine.parallel import fsdp
from engine.parallel import pipeline_parallel as stages
from engine.parallel.fsdp import shards_weights
from engine.parallel.layout import DATA_AXES
from engine.parallel.module_shards import local_box, local_tensor, named_tensors
from engine.parallel.process_groups import Ranks
from engine.parallel.sequence_parallel import apply_ulysses
from engine.parallel.tensor_parallel import apply_tensor_parallel, tied_parameters


@torch.no_grad()
def load_shards(
    module: nn.Module, source: UnloadedModel, device: torch.device, parameters: torch.device
) -> None:
    """Give `module`, this rank's part of `source`'s, storage and values.

    The rank's memory then holds its shards and, while one is read, a bucket. Buffers go to
    `device`; `parameters` is the same, or the CPU where they are offloaded. Names are those of the
    whole model, or of the embedding that a head in another stage is tied to.
    """
    tied = tied_parameters(module)
    made: dict[int, tuple[Tensor, Tensor]] = {}  # a tied parameter is met more than once

    def allocate(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor if isinstance(tensor, nn.Parameter) else tensor.to(device)
        if id(tensor) not in made:
            where = parameters if isinstance(tensor, nn.Parameter) else device
            made[id(tensor)] = tensor, torch.empty_like(tensor, device=where)
        return made[id(tensor)][1]

    module._apply(allocate)  # FSDP's module takes note of its parameters' new storage here
    for owner, name, first, name_there in tied:
        owner.register_parameter(name, first.get_parameter(name_there))
    for name, tensor in named_tensors(module).items():
        shard, box = local_tensor(tensor), local_box(tensor)
        if name in source.values:
            ends = zip(box.offset, box.size, strict=True)
            shard.copy_(source.values[name][tuple(slice(at, at + size) for at, size in ends)])
        elif name not in source.names:
            shard.zero_()
        elif box.elements:
            source.files.read(source.names[name], box.offset, shard)


log = logging.getLogger(__name__)

# Largest mean distance of a token's hidden states from the padded pass's, over their norm.
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.05


def allow_packing(model: Any, ranks: Ranks, config: ParallelConfig, device: torch.device) -> None:
    """Let `model` take packed rows where `config` wants them; call it before sharding.

    It will compute on `device`. Raises ConfigError where packing is true and the model can't take
    packed rows; auto leaves such a model to padded rows.
    """
    if config.packing is True:
        apply_packing(model)
    if config.packing != "auto" or not isinstance(model, PreTrainedModel | CriticModel):
        return
    problem: object = ""
    if device.type == "cuda" and not _computes_in_half(model, config):
        problem = "the GPU's kernel for packed ones takes float16 and bfloat16"
    else:
        try:
            apply_packing(model, "auto")
        except ConfigError as error:
            problem = error
    if problem and ranks.rank == 0:
        log.warning("rows are padded, and shared prompts computed once a row: %s", problem)


def check_sample(batch: Batch) -> Batch:
    """A few rows of `batch`, the first two with one prompt, to compute packed and padded."""
    prompt = batch["input_ids"].shape[1] - batch["responses"].shape[1]
    answered = batch["attention_mask"][:, prompt:].any(1).nonzero().squeeze(1)[:3].tolist()
    rows = (answered or [0]) * 2 if len(answered) < 2 else answered
    sample = batch.select(TOKENS).rows(rows)
    shared = {name: sample[name].clone() for name in ("input_ids", "attention_mask")}
    for tensor in shared.values():
        tensor[1, :prompt] = tensor[0, :prompt]
    return sample | shared


def accept(module: nn.Module, error: float, ranks: Ranks, config: ParallelConfig) -> None:
    """Go on with packed rows if no rank's hidden states are further off (`error`) than rounding."""
    half = _computes_in_half(module, config)
    fine = error <= (HALF_TOLERANCE if half else TOLERANCE)  # not for NaN
    sharing = ("pp", "sp", "tp", *DATA_AXES) if shards_weights(ranks) else ("pp", "tp")
    if ranks.max_over(int(not fine), sharing):
        set_packing(module, False)
        log.warning(
            "packed rows' hidden states are %.2g of their norm away from those of padded rows on "
            "this rank: rows are padded from here on",
            error,
        )


def _computes_in_half(module: nn.Module, config: ParallelConfig) -> bool:
    if config.compute_dtype:
        return config.compute_dtype != "float32"
    return any(p.dtype in (torch.float16, torch.bfloat16) for p in module.parameters())


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
    fusible = whole or (device.type == "cuda" and ranks.size("tp") == 1)
    if fusible and gains_by_fusion(floating_dtype(module), device):
        apply_fused(module, device)
    checkpoints = config.activation_checkpointing or config.activation_offload
    layers = decoder_layers(module) if shards or checkpoints else []
    if ranks.size("tp") > 1:
        apply_tensor_parallel(
            module, ranks.submesh("tp"), sequence_parallel=config.sequence_parallel
        )
    if checkpoints:
        fsdp.checkpoint_activations(layers, checkpoints, offload=config.activation_offload)
    apply_ulysses(module, ranks)
    fsdp.shard_model(module, ranks, config, layers=layers)
    if unloaded is not None and not whole:
        offloaded = shards and config.offload_policy
        load_shards(module, unloaded, device, torch.device("cpu") if offloaded else device)
    return module


def decoder_layers(module: ModelPart) -> list[nn.Module]:
    """The repeated layers of a model, a critic or a stage, in order."""
    if isinstance(module, stages.PipelineStage):
        return module.layers
    body: Any = module.base_model
    count = body.config.get_text_config().num_hidden_layers
    lists = (m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return list(next(lists, []))


def floating_dtype(module: nn.Module) -> torch.dtype:
    return next(p.dtype for p in module.parameters() if p.is_floating_point())
