"""Generalised advantage estimation, with a critic."""

import torch

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
)
from engine.algorithms.masked import masked_whiten


@register_advantage("gae", requires=("values",))
def gae(
    inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> AdvantageOutputs:
    """δ_t = r_t + γV⁺ − V_t; L_t = δ_t + γλL⁺; returns = L + V; A = whiten(L).

    V⁺ and L⁺ belong to the policy's next token: masked tokens (a tool's or user's turn) pass
    them on unchanged. `whiten=False` keeps A = L.
    Source: Schulman et al., arXiv 1506.02438, eq. 16.
    """
    rewards, values, mask = (
        inputs.token_level_rewards,
        inputs.need("values"),
        inputs.response_mask.bool(),
    )
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        here = delta + gamma * lam * next_advantage
        advantages[:, t] = here
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], here, next_advantage)
    returns = advantages + values
    return AdvantageOutputs(masked_whiten(advantages, mask) if whiten else advantages, returns)
