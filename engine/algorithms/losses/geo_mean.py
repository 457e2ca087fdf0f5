"""GMPO: the geometric mean of token ratios, each clipped in log space."""

import torch
from torch import Tensor

from engine.algorithms.losses._base import LossOutput, register_policy_loss
from engine.algorithms.losses._ratio import bounds, check_clip, fraction, log_ratio
from engine.algorithms.masked import masked_mean


@register_policy_loss(
    "geo_mean",
    default_mode="seq-mean-token-mean",
    fixed=True,
    sequence_weights=True,
    validate=check_clip,
)
def geo_mean(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float = 0.4,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> LossOutput:
    """L_i = −Ā_i·exp(mean_t Δ'), Δ' = s·min(s·Δ, s·clip(Δ, −ε_l, ε_h)), s = sign(A).

    The completion's loss stands on each of its tokens, so that aggregation over the global batch
    gives the mean over completions whatever the micro-batches are (verl divides by the rows of a
    micro-batch there). Bounds are in log space, 0.4 in the paper. Ā is the mean advantage.
    Source: Zhao et al., arXiv 2507.20673.
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    delta = log_ratio(log_probs, old_log_probs)
    sign = advantages.sign()
    near = delta.clamp(-low, high)
    pessimistic = sign * torch.minimum(sign * delta, sign * near)
    ratio = masked_mean(pessimistic, mask, 1).exp()
    loss = -masked_mean(advantages, mask, 1) * ratio
    outside = delta != near
    metrics = {
        "pg_clipfrac": fraction(outside & (advantages > 0), mask),
        "pg_clipfrac_lower": fraction(outside & (advantages < 0), mask),
    }
    return LossOutput(loss[:, None].expand(mask.shape), metrics)
