"""GRPO and Dr. GRPO: a completion's score relative to its group."""

from torch import Tensor

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
    to_tokens,
)
from engine.algorithms.masked import Groups, safe_divide


@register_advantage("grpo", "grpo_vectorized", min_group_size=2)
def grpo(
    inputs: AdvantageInputs, *, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> AdvantageOutputs:
    """A = (S − μ_g)/(σ_g + ε) on every token; without the division: Dr. GRPO.

    σ has Bessel's correction. A group of equal scores gives exactly 0; a group of one gives S
    (μ = 0, σ = 1), as verl has it. Completions without tokens count in no statistic.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783.
    """
    normed = grpo_scores(inputs.scores, inputs.groups, norm_adv_by_std_in_grpo, epsilon)
    tokens = to_tokens(normed, inputs.response_mask)
    return AdvantageOutputs(tokens, tokens)


def grpo_scores(scores: Tensor, groups: Groups, by_std: bool, epsilon: float) -> Tensor:
    """The same for scores `[B]` → `[B]`."""
    centered = scores - groups.mean(scores)[groups.index]
    if by_std:
        centered = safe_divide(centered, groups.std(scores)[groups.index] + epsilon)
    return scores.where((groups.size == 1)[groups.index], centered)
