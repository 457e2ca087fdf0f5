"""DPPO with a bound on the change of a token's probability (total variation)."""

import torch
from torch import Tensor

from engine.algorithms.losses._base import LossOutput, register_policy_loss
from engine.algorithms.losses._divergence import trust_region_loss
from engine.algorithms.losses._ratio import bounds, check_clip


@register_policy_loss("dppo_tv", validate=check_clip)
def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = 20.0,
) -> LossOutput:
    """−A·sg(min(ρ, C))·log π where π − π_old ≤ ε_h (A > 0) or ≥ −ε_l (A ≤ 0), else 0.

    The bounds are on probabilities: a rare token may multiply its ratio many times over.
    Source: arXiv 2602.04879, DPPO with the binary TV divergence.
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    change = log_probs.detach().exp() - old_log_probs.exp()
    inside = torch.where(advantages > 0, change <= high, change >= -low)
    return trust_region_loss(log_probs, old_log_probs, advantages, mask, inside, clip_ratio_c)
