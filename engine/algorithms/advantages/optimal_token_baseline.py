"""Optimal token baseline: one baseline a group and token, weighed by gradient energy."""

import torch
from torch import Tensor

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
)
from engine.algorithms.masked import mask_out, reward_to_go


@register_advantage(
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    requires=("old_log_probs", "sum_pi_squared"),
    min_group_size=2,
)
def optimal_token_baseline(
    inputs: AdvantageInputs, *, handle_zero_tail: bool = True, epsilon: float = 1e-8
) -> AdvantageOutputs:
    """w_t = (1 − 2π_t + Σπ²)·ρ²; W = cumsum(w); b_t = Σ_g G_t W_t/(Σ_g W_t + ε); A = G − b.

    w_t is the squared norm of the score at the logits; ρ the rollout correction's weight, if any.
    Token t is the policy's t-th token: masked turns between are skipped, so completions of one
    prompt align. `handle_zero_tail`: where only one completion is that long, its own return
    would be its baseline and it would learn nothing there; it gets baseline 0 instead. A group of
    one has baseline 0. Returns are G.
    Source: verl's optimal token baseline; the optimal baseline of Greensmith et al. (2004).
    """
    mask, groups = inputs.response_mask.bool(), inputs.groups
    returns = reward_to_go(inputs.token_level_rewards, mask)
    energy = 1 - 2 * inputs.need("old_log_probs").exp() + inputs.need("sum_pi_squared")
    if inputs.rollout_is_weights is not None:
        energy = energy * inputs.rollout_is_weights.square()
    path = mask_out(mask, energy).cumsum(1)
    order = mask.long().cumsum(1) - 1
    packed = [_pack(mask_out(mask, x), order, mask) for x in (returns * path, path)]
    baseline = groups.sum(packed[0]) / (groups.sum(packed[1]) + epsilon)
    longer = groups.sum(_pack(mask.to(returns.dtype), order, mask))
    shared = longer > 1 if handle_zero_tail else (longer > 0) & (groups.size > 1)[:, None]
    baseline = mask_out(shared, baseline)[groups.index]
    return AdvantageOutputs(returns - baseline.gather(1, order.clamp(min=0)), returns)


def _pack(x: Tensor, order: Tensor, mask: Tensor) -> Tensor:
    """Move the entries inside the mask to the left, in order: `[B, T]` → `[B, T]`."""
    # Entries outside the mask are 0 and are added to where they change nothing.
    return torch.zeros_like(x).scatter_add(1, order.clamp(min=0), mask_out(mask, x))
