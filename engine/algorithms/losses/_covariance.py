"""The covariance of log-probability and advantage that Clip-Cov and KL-Cov select tokens by."""

from __future__ import annotations

from torch import Tensor

from engine.algorithms.masked import mask_out, masked_mean


def token_covariance(old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A − mean A)·(log π_old − mean log π_old) `[B, T]`, means over the global batch's mask.

    With the log-probs before the update: those of the running policy would differ in every
    micro-batch's statistic and cost a second forward pass.
    Source: arXiv 2505.22617.
    """
    centered = advantages - masked_mean(advantages, mask)
    return mask_out(mask, centered * (old_log_probs - masked_mean(old_log_probs, mask)))
