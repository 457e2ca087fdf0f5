"""GSPO: one ratio a completion, its length-normalised likelihood ratio."""

from torch import Tensor

from engine.algorithms.losses._base import LossOutput, register_policy_loss
from engine.algorithms.losses._ratio import (
    LOG_RATIO_BOUND,
    bounds,
    check_clip,
    clipped_surrogate,
    fraction,
)
from engine.algorithms.masked import masked_mean


@register_policy_loss("gspo", default_mode="seq-mean-token-mean", fixed=True, validate=check_clip)
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float = 3e-4,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> LossOutput:
    """s_t = exp(sg(mean_t Δ) + log π − sg(log π)), then PPO's clip on s.

    Every token has the value of the completion's ratio and the gradient of its own log-prob (the
    paper's token variant, equal to the sequence variant for constant A). A mean over a whole
    completion moves little, so bounds are far below PPO's: the paper has 3e-4 and 4e-4.
    Source: Zheng et al., arXiv 2507.18071, eq. 7 and 14.
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    mean = masked_mean(log_probs - old_log_probs, mask, 1).detach()
    mean = mean.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = (mean[:, None] + log_probs - log_probs.detach()).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, low, high)
    return LossOutput(loss, {"pg_clipfrac": fraction(clipped, mask)})
