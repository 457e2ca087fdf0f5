"""The truncated REINFORCE inside a trust region that both DPPO variants share."""

import torch
from torch import Tensor

from engine.algorithms.losses._base import LossOutput
from engine.algorithms.losses._ratio import fraction, log_ratio


def trust_region_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    inside: Tensor,
    clip_ratio_c: float | None,
) -> LossOutput:
    """−A·sg(min(ρ, C))·log π on the tokens `inside [B, T]` the trust region, 0 on the others."""
    ratio = log_ratio(log_probs, old_log_probs).exp().detach()
    weight = ratio if clip_ratio_c is None else ratio.clamp(max=clip_ratio_c)
    loss = torch.where(inside, -advantages * weight * log_probs, torch.zeros_like(log_probs))
    metrics = {"pg_clipfrac": fraction(~inside, mask)}
    if clip_ratio_c is not None:
        metrics["pg_clipfrac_lower"] = fraction((ratio > clip_ratio_c) & inside, mask)
    return LossOutput(loss, metrics)
