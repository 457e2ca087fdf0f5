"""Clip-Cov: PPO, with a few tokens of high covariance left out to keep entropy."""

from typing import Any

import torch
from torch import Tensor

from engine.algorithms.losses._base import LossOutput, register_policy_loss
from engine.algorithms.losses._covariance import token_covariance
from engine.algorithms.losses._ratio import (
    bounds,
    check_clip,
    clipped_surrogate,
    fraction,
    log_ratio,
)
from engine.algorithms.masked import mask_out
from engine.errors import ConfigError


def _select(
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    generator: torch.Generator | None,
    *,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> dict[str, Tensor]:
    """Draw max(1, ratio·N) of the tokens whose covariance lies between the bounds."""
    covariance = token_covariance(old_log_probs, advantages, mask)
    inside = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & mask
    candidates = inside.flatten().nonzero().squeeze(1)
    count = max(1, int(clip_cov_ratio * int(mask.sum())))
    order = torch.randperm(len(candidates), generator=generator)[:count]
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    chosen[candidates[order.to(candidates.device)]] = True
    return {"cov_selected": chosen.view(mask.shape)}


def _check(*, clip_cov_ratio: float, clip_cov_lb: float, clip_cov_ub: float, **rest: Any) -> None:
    check_clip(**rest)
    if clip_cov_ratio <= 0:
        raise ConfigError(f"clip_cov_ratio={clip_cov_ratio} must be above 0")
    if clip_cov_lb >= clip_cov_ub:
        raise ConfigError(f"clip_cov_lb={clip_cov_lb} must be below clip_cov_ub={clip_cov_ub}")


@register_policy_loss("clip_cov", prepare=_select, prepared=("cov_selected",), validate=_check)
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cov_selected: Tensor,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> LossOutput:
    """PPO's clip, 0 on the tokens in `cov_selected [B, T]` (from `losses.prepare`).

    Source: Cui et al., arXiv 2505.22617.
    """
    selected = cov_selected.bool()
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    ratio = log_ratio(log_probs, old_log_probs).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, low, high)
    metrics = {
        "pg_clipfrac": fraction(clipped & ~selected, mask),
        "cov_selected_frac": fraction(selected, mask),
    }
    return LossOutput(mask_out(~selected, loss), metrics)
