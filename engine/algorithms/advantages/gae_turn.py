"""Generalised advantage estimation over turns: a turn is one action."""

import torch

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
)
from engine.algorithms.masked import masked_whiten


@register_advantage("gae_turn", requires=("values",))
def gae_turn(
    inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> AdvantageOutputs:
    """δ_k = r_k + γV_{k+1} − V_k; L_k = δ_k + γλL_{k+1}; A = whiten(L), R = L + V.

    r_k is the sum of turn k's rewards and V_k the value before its first token; all tokens of a
    turn get its A and R. γ and λ discount turns, not tokens. With one token a turn it is `gae`.
    Source: the turn level of VAGEN's Bi-Level GAE, arXiv 2510.16907; GAE is Schulman et al., arXiv
    1506.02438, eq. 16.
    """
    turns = inputs.turns
    rewards = turns.sum(inputs.token_level_rewards)
    values = turns.first(inputs.need("values"))
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for k in reversed(range(values.shape[1])):
        here = turns.present[:, k]
        delta = rewards[:, k] + gamma * next_value - values[:, k]
        advantages[:, k] = torch.where(here, delta + gamma * lam * next_advantage, 0.0)
        next_value = torch.where(here, values[:, k], next_value)
        next_advantage = torch.where(here, advantages[:, k], next_advantage)
    tokens = turns.to_tokens(advantages)
    returns = turns.to_tokens(advantages + values)
    return AdvantageOutputs(masked_whiten(tokens, turns.mask) if whiten else tokens, returns)
