"""The critic's loss.

What lives here: squared error with clipped predictions, and its metrics.
What does not: how returns are made (`engine.algorithms.advantages`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.algorithms.losses import LossOutput
from engine.algorithms.masked import at_least_float, mask_out
from engine.algorithms.metrics import accumulate_mean
from engine.errors import ConfigError, DataError


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float | None = 0.5,
) -> LossOutput:
    """½·max((V − R)², (clip(V, V_old ± ε) − R)²), all `[B, T]`; aggregate it like a policy loss.

    `cliprange_value=None` turns clipping off. Gradient flows into `values` only. Metrics:
    `vf_clipfrac`, `vpred_mean`. Source: PPO's reference code; arXiv 1506.02438, appendix.
    Raises ConfigError for a negative range, DataError for unequal shapes.
    """
    if cliprange_value is not None and cliprange_value < 0:
        raise ConfigError(f"cliprange_value={cliprange_value} must not be negative")
    mask = response_mask.bool()
    for name, tensor in (("values", values), ("old_values", old_values), ("returns", returns)):
        if tensor.shape != mask.shape:
            raise DataError(
                f"{name} has shape {list(tensor.shape)} but response_mask {list(mask.shape)}"
            )
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
