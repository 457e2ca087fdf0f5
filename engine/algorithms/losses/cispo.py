"""CISPO: clip the importance weight, keep every token's gradient."""

from torch import Tensor

from engine.algorithms.losses._base import LossOutput, register_policy_loss
from engine.algorithms.losses._ratio import bounds, check_clip, fraction, log_ratio


@register_policy_loss("cispo", validate=check_clip)
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> LossOutput:
    """−A·sg(clip(ρ, 1−ε_l, 1+ε_h))·log π: rare tokens outside the range still learn.

    Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    ratio = log_ratio(log_probs, old_log_probs).exp().detach()
    weight = ratio.clamp(1 - low, 1 + high)
    loss = -advantages * weight * log_probs
    return LossOutput(loss, {"pg_clipfrac": fraction(weight != ratio, mask)})
