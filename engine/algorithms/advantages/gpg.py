"""GPG: group-centred scores, scaled up by the share of completions that earned something."""

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
    to_tokens,
)
from engine.algorithms.advantages.grpo import grpo_scores


@register_advantage("gpg", min_group_size=2)
def gpg(inputs: AdvantageInputs, *, f_norm: float = 1.0) -> AdvantageOutputs:
    """A = α·(S − μ_g)/f_norm with α = B/max(#{S ≠ 0}, 1).

    B and # count completions with tokens. A group of one has baseline 0, as in verl.
    Source: Chu et al., arXiv 2504.02546.
    """
    scores, groups = inputs.scores, inputs.groups
    nonzero = ((scores != 0) & groups.rows).sum().clamp(min=1)
    alpha = groups.rows.sum() / nonzero
    centered = grpo_scores(scores, groups, by_std=False, epsilon=0.0)
    tokens = to_tokens(alpha.to(scores.dtype) * centered / f_norm, inputs.response_mask)
    return AdvantageOutputs(tokens, tokens)
