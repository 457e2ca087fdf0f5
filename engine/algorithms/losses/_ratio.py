"""What most policy losses share: the clamped ratio, PPO's clip, its bounds and their checks."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.algorithms.metrics import MeanAccumulator, accumulate_mean
from engine.errors import ConfigError

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this, so that their exponentials stay finite."""


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Δ = log π − log π_old `[B, T]`, clamped to ±20 (the gradient is 0 beyond)."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def bounds(
    clip_ratio: float, clip_ratio_low: float | None, clip_ratio_high: float | None
) -> tuple[float, float]:
    """ε_l and ε_h; `clip_ratio` sets each one that isn't given."""
    low = clip_ratio if clip_ratio_low is None else clip_ratio_low
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    return low, high


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """max(−Aρ, −A·clip(ρ, 1−ε_l, 1+ε_h)) `[B, T]`, and where the clip decides (bool)."""
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(free, clipped), clipped > free


def check_clip(
    *,
    clip_ratio: float,
    clip_ratio_low: float | None,
    clip_ratio_high: float | None,
    clip_ratio_c: float | None = None,
    **_: object,
) -> None:
    """Raise ConfigError when a bound is negative or the dual-clip constant is not above 1."""
    given = {
        "clip_ratio": clip_ratio,
        "clip_ratio_low": clip_ratio_low,
        "clip_ratio_high": clip_ratio_high,
    }
    for name, value in given.items():
        if value is not None and value < 0:
            raise ConfigError(f"{name}={value} must not be negative")
    if clip_ratio_c is not None and clip_ratio_c <= 1:
        raise ConfigError(
            f"clip_ratio_c={clip_ratio_c} must be above 1, since it caps ratios well outside the "
            "clip range; set 3.0, or null for none"
        )


def fraction(condition: Tensor, mask: Tensor) -> MeanAccumulator:
    """How many tokens inside the mask fulfil `condition [B, T]`."""
    return accumulate_mean(condition.double(), mask)
