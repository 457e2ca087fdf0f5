"""What an optimizer step does to the weights: AdamW, Adam or SGD, of torch or compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.config import OptimConfig
from engine.runtime.compiled_adamw import CompiledAdamW, takes_masters


def make_update_rule(
    config: OptimConfig,
    stored: Sequence[Tensor],
    working: Mapping[Tensor, nn.Parameter],
) -> torch.optim.Optimizer:
    """The rule that updates `stored`: masters of the parameters `working`, or the weights.

    Biases, norms and other vectors get no weight decay. AdamW of masters alone is one compiled pass
    where that can be. All are elementwise, so that each rank may update its shards.
    """
    groups: list[dict[str, object]] = []
    if matrices := [tensor for tensor in stored if tensor.dim() >= 2]:
        groups.append({"params": matrices})
    if vectors := [tensor for tensor in stored if tensor.dim() < 2]:
        groups.append({"params": vectors, "weight_decay": 0.0})
    options: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    if config.optimizer == "SGD":
        return torch.optim.SGD(groups, momentum=config.momentum, **options)
    options["betas"] = (config.beta1, config.beta2)
    if config.optimizer == "Adam":
        return torch.optim.Adam(groups, **options)
    if takes_masters(working, len(stored)):
        return CompiledAdamW(groups, working, **options)
    return torch.optim.AdamW(groups, **options)


def state_kind(optimizer: str) -> str:
    """The kind of a rule's state: rules of one kind can go on from each other's."""
    return "Adam" if optimizer == "AdamW" else optimizer
