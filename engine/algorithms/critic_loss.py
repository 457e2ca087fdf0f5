"""The critic's loss, and which rows an update may leave out because their loss is exactly zero."""

import torch
from torch import Tensor

from engine.algorithms import checks
from engine.algorithms.aggregation import accumulate_mean
from engine.algorithms.masked import at_least_float, mask_out
from engine.algorithms.policy_losses import LossOutput, get_policy_loss


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float | None = 0.5,
) -> LossOutput:
    """Return ½·max((V − R)², (clip(V, V_old ± ε) − R)²) `[B, T]`; aggregate it as a policy loss.

    `cliprange_value=None` turns clipping off. Gradient flows into `values` only. Metrics:
    `vf_clipfrac`, `vpred_mean`. Source: PPO's reference code; arXiv 1506.02438, appendix.
    Raises ConfigError for a negative range, DataError for unequal shapes.
    """
    checks.not_negative(cliprange_value=cliprange_value)
    mask = response_mask.bool()
    checks.shapes({"values": values, "old_values": old_values, "returns": returns}, mask)
    values = mask_out(mask, at_least_float(values))
    old_values = mask_out(mask, at_least_float(old_values.detach()))
    returns = mask_out(mask, at_least_float(returns.detach()))
    free = (values - returns).square()
    metrics = {"vpred_mean": accumulate_mean(values, mask)}
    if cliprange_value is None:
        return LossOutput(mask_out(mask, 0.5 * free), metrics)
    # min/max with tensors, not clamp, because the bounds differ by token.
    near = torch.minimum(
        torch.maximum(values, old_values - cliprange_value), old_values + cliprange_value
    )
    clipped = (near - returns).square()
    metrics["vf_clipfrac"] = accumulate_mean((clipped > free).double(), mask)
    return LossOutput(mask_out(mask, 0.5 * torch.maximum(free, clipped)), metrics)


def rows_with_gradient(
    loss_mode: str,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    entropy_coeff: float = 0.0,
    kl_loss_coef: float = 0.0,
) -> Tensor:
    """Return the rows `[B]` (bool) that can change the gradient; train on these alone.

    A row can't without a token inside the mask, or when all its advantages are 0 and no entropy
    bonus, KL term or penalty inside the loss pulls. Denominators still come from the whole batch's
    mask.
    """
    mask = response_mask.bool()
    pulled = bool(entropy_coeff or kl_loss_coef) or get_policy_loss(loss_mode).regularized
    return mask.any(1) if pulled else mask_out(mask, advantages).ne(0).any(1)
