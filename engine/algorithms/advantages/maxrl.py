"""MaxRL: score relative to the group's mean, an estimator of the gradient of log pass-rate."""

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
    to_tokens,
)
from engine.algorithms.masked import mask_out, safe_divide


@register_advantage("maxrl", min_group_size=2)
def maxrl(inputs: AdvantageInputs, *, epsilon: float = 1e-6) -> AdvantageOutputs:
    """A = (S − μ_g)/μ_g where μ_g > ε, else 0. For scores that are 0 or more.

    Dividing by the pass rate weighs hard prompts up, as maximum likelihood does; a group
    without success (or of one) gives 0.
    Source: Maximum Likelihood Reinforcement Learning, arXiv 2602.02710.
    """
    scores, groups = inputs.scores, inputs.groups
    mean = groups.mean(scores)[groups.index]
    relative = mask_out(mean > epsilon, safe_divide(scores - mean, mean))
    tokens = to_tokens(relative, inputs.response_mask)
    return AdvantageOutputs(tokens, tokens)
