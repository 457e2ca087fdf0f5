"""KTO: each completion alone is good or bad, measured against a reference point."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.algorithms.masked import at_least_float, masked_mean
from engine.algorithms.metrics import accumulate_mean
from engine.algorithms.preference._base import PreferenceOutput
from engine.errors import ConfigError, DataError


def kto_reference_point(policy_kl: Tensor, ref_kl: Tensor, rows: Tensor | None = None) -> Tensor:
    """z₀ = max(0, mean(log π − log π_ref)) over the GLOBAL batch: a scalar without gradient.

    `policy_kl`, `ref_kl` `[B]` are log-probs of completions paired with other rows' prompts.
    `rows [B]` (bool) leaves rows out.
    """
    gap = at_least_float(policy_kl.detach()) - at_least_float(ref_kl.detach())
    rows = torch.ones_like(gap, dtype=torch.bool) if rows is None else rows
    return masked_mean(gap, rows).clamp(min=0)


def kto(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    reference_point: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PreferenceOutput:
    """λ_D·(1 − σ(β(ρ − z₀))) for good rows, λ_U·(1 − σ(β(z₀ − ρ))) for bad ones, `[B]`.

    ρ = log π − log π_ref of whole responses `[B]`, `desirable [B]` bool, z₀ from
    `kto_reference_point`, once for the global batch.
    Source: Ethayarajh et al., arXiv 2402.01306.
    Raises ConfigError for beta ≤ 0 or negative weights, DataError for unequal shapes.
    """
    if beta <= 0:
        raise ConfigError(f"beta={beta} must be above 0")
    if min(desirable_weight, undesirable_weight) < 0:
        raise ConfigError(
            f"desirable_weight={desirable_weight} and undesirable_weight={undesirable_weight} "
            "must not be negative"
        )
    if not policy.shape == reference.shape == desirable.shape:
        raise DataError(
            f"policy {list(policy.shape)}, reference {list(reference.shape)} and desirable "
            f"{list(desirable.shape)} differ in shape"
        )
    good = desirable.bool()
    ratio = at_least_float(policy) - at_least_float(reference.detach())
    away = torch.where(good, ratio - reference_point, reference_point - ratio)
    weight = torch.full_like(ratio, undesirable_weight).masked_fill(good, desirable_weight)
    metrics = {
        "rewards/chosen": accumulate_mean(beta * ratio, good),
        "rewards/rejected": accumulate_mean(beta * ratio, ~good),
    }
    return PreferenceOutput(weight * torch.sigmoid(-beta * away), metrics)
