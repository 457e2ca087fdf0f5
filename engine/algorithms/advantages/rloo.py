"""RLOO: the mean of the other completions as the baseline."""

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
    to_tokens,
)


@register_advantage("rloo", "rloo_vectorized", min_group_size=2)
def rloo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """A_i = S_i − mean of the group's other scores = n/(n−1)·(S_i − μ_g).

    A group of one has no others and gives 0 (verl's two variants disagree there).
    Source: Ahmadian et al., arXiv 2402.14740.
    """
    scores, groups = inputs.scores, inputs.groups
    factor = groups.size / (groups.size - 1).clamp(min=1)
    centered = scores - groups.mean(scores)[groups.index]
    tokens = to_tokens(factor.to(scores.dtype)[groups.index] * centered, inputs.response_mask)
    return AdvantageOutputs(tokens, tokens)
