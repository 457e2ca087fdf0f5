"""ReMax: the reward of a greedy completion as the baseline."""

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
)
from engine.algorithms.masked import reward_to_go


@register_advantage("remax", requires=("baseline_rewards",))
def remax(inputs: AdvantageInputs) -> AdvantageOutputs:
    """A_t = G_t − b: G the undiscounted reward-to-go, b the greedy completion's reward.

    Source: Li et al., arXiv 2310.10505.
    """
    returns = reward_to_go(inputs.token_level_rewards, inputs.response_mask)
    return AdvantageOutputs(returns - inputs.need("baseline_rewards")[:, None], returns)
