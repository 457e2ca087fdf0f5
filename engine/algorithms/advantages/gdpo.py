"""GDPO: several reward components, each normalised within the group before they are added."""

from collections.abc import Sequence

import torch

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
    to_tokens,
)
from engine.algorithms.advantages.grpo import grpo_scores
from engine.algorithms.masked import masked_whiten
from engine.errors import ConfigError


@register_advantage("gdpo", requires=("reward_components",), min_group_size=2)
def gdpo(
    inputs: AdvantageInputs,
    *,
    gdpo_reward_weights: Sequence[float] | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> AdvantageOutputs:
    """A = whiten(Σ_k w_k·GRPO(component k)) over all tokens inside the mask.

    Weights default to 1 each. So a component of small scale is not drowned by a large one.
    Source: arXiv 2601.05242.
    Raises ConfigError when the number of weights is not the number of components.
    """
    components = inputs.need("reward_components")
    if components.dim() == 3:
        components = components.sum(1)
    count = components.shape[1]
    weights = [1.0] * count if gdpo_reward_weights is None else list(gdpo_reward_weights)
    if len(weights) != count:
        raise ConfigError(
            f"gdpo_reward_weights has {len(weights)} entries but the reward returns {count} "
            "components; give one weight a component"
        )
    total = torch.zeros_like(components[:, 0])
    for component, weight in zip(components.unbind(1), weights, strict=True):
        normed = grpo_scores(component, inputs.groups, norm_adv_by_std_in_grpo, epsilon)
        total = total + weight * normed
    tokens = masked_whiten(to_tokens(total, inputs.response_mask), inputs.response_mask)
    return AdvantageOutputs(tokens, tokens)
