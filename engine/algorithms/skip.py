"""Leaving out what has no gradient: forward and backward passes that would add exact zeros.

What lives here: which rows matter. What does not: the passes. Denominators still come from the
whole batch's mask, so the gradient stays the same.
"""

from __future__ import annotations

from torch import Tensor

from engine.algorithms.losses import get_policy_loss
from engine.algorithms.masked import mask_out


def rows_with_gradient(
    loss_mode: str,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    entropy_coeff: float = 0.0,
    kl_loss_coef: float = 0.0,
) -> Tensor:
    """Rows `[B]` (bool) that can change the gradient; train on these alone.

    A row can't when it has no token inside the mask, or when all its advantages are 0 and nothing
    else pulls: no entropy bonus, no KL term, no penalty inside the loss (`dro`, `kl_cov`). The
    rows left out contribute 0 to the loss as well; their metrics (e.g. ppo_kl) are not counted.
    """
    mask = response_mask.bool()
    pulled = bool(entropy_coeff or kl_loss_coef) or get_policy_loss(loss_mode).regularized
    return mask.any(1) if pulled else mask_out(mask, advantages).ne(0).any(1)
