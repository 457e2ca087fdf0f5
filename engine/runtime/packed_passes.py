"""Whether a sharded model's passes take packed rows: by its configuration, and by a check.

`engine.models.packing` packs. Layouts and families that can't take packed rows get padded ones, and
so does a model whose packed rows, when they are first used, don't give what padded ones do.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.batch import TOKENS, Batch
from engine.config import ParallelConfig
from engine.errors import ConfigError
from engine.models.critic import CriticModel
from engine.models.packing import apply_packing, set_packing
from engine.parallel.fsdp import shards_weights
from engine.parallel.layout import DATA_AXES
from engine.parallel.process_groups import Ranks

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
    """Go on with packed rows if no rank's differ from padded ones by more than rounding.

    `error`: the mean relative distance of hidden states. Ranks that share the model call it
    together.
    """
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
    """Whether passes are in float16 or bfloat16, by the weights or by `compute_dtype`."""
    if config.compute_dtype:
        return config.compute_dtype != "float32"
    return any(p.dtype in (torch.float16, torch.bfloat16) for p in module.parameters())
