"""DPPO with a bound on the binary KL divergence of a token."""

import torch
from torch import Tensor

from engine.algorithms.losses._base import LossOutput, register_policy_loss
from engine.algorithms.losses._divergence import trust_region_loss
from engine.algorithms.losses._ratio import bounds, check_clip


@register_policy_loss("dppo_kl", validate=check_clip)
def dppo_kl(
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
    """−A·sg(min(ρ, C))·log π where the token moves back or its divergence is in bounds, else 0.

    The divergence is KL(π_old ‖ π) of "this token or any other"; its bound is ε_h for A > 0 (only
    growing probabilities are bound) and ε_l for A ≤ 0 (only shrinking ones).
    Source: arXiv 2602.04879, DPPO with the binary KL divergence.
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    new = log_probs.detach()
    divergence = binary_kl(old_log_probs, new)
    grows = torch.where(advantages > 0, new > old_log_probs, new < old_log_probs)
    limit = torch.full_like(advantages, low).masked_fill(advantages > 0, high)
    inside = ~grows | (divergence <= limit)
    return trust_region_loss(log_probs, old_log_probs, advantages, mask, inside, clip_ratio_c)


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p·log(p/q) + (1−p)·log((1−p)/(1−q)) of two Bernoulli log-probabilities, any shape."""
    # Probabilities stay below 1 by what the dtype can tell apart, so that no logarithm diverges.
    ceiling = 1 - 2 * torch.finfo(log_p.dtype).eps
    p, q = log_p.exp().clamp(max=ceiling), log_q.exp().clamp(max=ceiling)
    return p * (log_p - log_q) + (1 - p) * (torch.log1p(-p) - torch.log1p(-q))
