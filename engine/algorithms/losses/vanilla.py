"""PPO's clipped surrogate with asymmetric bounds and dual clip."""

import torch
from torch import Tensor

from engine.algorithms.losses._base import LossOutput, register_policy_loss
from engine.algorithms.losses._ratio import (
    bounds,
    check_clip,
    clipped_surrogate,
    fraction,
    log_ratio,
)


@register_policy_loss("vanilla", validate=check_clip)
def vanilla(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = 3.0,
) -> LossOutput:
    """c = max(−Aρ, −A·clip(ρ, 1−ε_l, 1+ε_h)); where A < 0: min(c, −A·C). All `[B, T]`.

    `clip_ratio` sets both bounds unless they are given (ε_h > ε_l: DAPO's clip-higher);
    `clip_ratio_c=None` turns the dual clip off.
    Source: PPO, arXiv 1707.06347, eq. 7; dual clip, arXiv 1912.09729.
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    ratio = log_ratio(log_probs, old_log_probs).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, low, high)
    metrics = {"pg_clipfrac": fraction(clipped, mask)}
    if clip_ratio_c is not None:
        ceiling, negative = -advantages * clip_ratio_c, advantages < 0
        metrics["pg_clipfrac_lower"] = fraction((loss > ceiling) & negative, mask)
        loss = torch.where(negative, torch.minimum(loss, ceiling), loss)
    return LossOutput(loss, metrics)
