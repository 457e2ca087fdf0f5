"""REINFORCE++ with the group's mean as the baseline."""

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
    to_tokens,
)
from engine.algorithms.advantages.grpo import grpo_scores
from engine.algorithms.masked import masked_whiten


@register_advantage("reinforce_plus_plus_baseline", min_group_size=2)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> AdvantageOutputs:
    """A = whiten((S − μ_g)·m) over all tokens of the batch; a group of one has baseline 0.

    Source: Hu, arXiv 2501.03262, the variant with a group baseline.
    """
    centered = grpo_scores(inputs.scores, inputs.groups, by_std=False, epsilon=0.0)
    tokens = to_tokens(centered, inputs.response_mask)
    white = masked_whiten(tokens, inputs.response_mask)
    return AdvantageOutputs(white, white)
