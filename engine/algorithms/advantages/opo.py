"""OPO: the variance-optimal baseline of a group when gradients grow with length."""

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
    to_tokens,
)


@register_advantage("opo", min_group_size=2)
def opo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """A_i = S_i − Σ_g len·S / Σ_g len, with len in tokens inside the mask.

    A group of equal scores gives exactly 0; a group of one gives S (baseline 0, as in verl).
    Source: Hao et al., arXiv 2505.23585.
    """
    scores, groups, mask = inputs.scores, inputs.groups, inputs.response_mask
    lengths = mask.bool().sum(1).to(scores.dtype)
    # Weighing differences to the group's smallest score keeps equal scores exact.
    origin = groups.min(scores)
    weighted = groups.sum(lengths * (scores - origin[groups.index]))
    baseline = origin + weighted / groups.sum(lengths).clamp(min=1)
    alone = (groups.size == 1)[groups.index]
    tokens = to_tokens(scores.where(alone, scores - baseline[groups.index]), mask)
    return AdvantageOutputs(tokens, tokens)
