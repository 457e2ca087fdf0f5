"""REINFORCE++: discounted reward-to-go, whitened over the batch."""

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
)
from engine.algorithms.masked import masked_whiten, reward_to_go


@register_advantage("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float = 1.0) -> AdvantageOutputs:
    """R_t = r_t + γR⁺ over the policy's tokens; A = whiten(R).

    Masked tokens carry R across. No groups, no critic.
    Source: Hu, arXiv 2501.03262.
    """
    returns = reward_to_go(inputs.token_level_rewards, inputs.response_mask, gamma)
    return AdvantageOutputs(masked_whiten(returns, inputs.response_mask), returns)
