"""GRPO for pass@k: only a group's best completion is pushed, by its lead over the second."""

import torch

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
    to_tokens,
)
from engine.algorithms.masked import safe_divide


@register_advantage("grpo_passk", min_group_size=2)
def grpo_passk(
    inputs: AdvantageInputs, *, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> AdvantageOutputs:
    """A = (S_max − S_second)/(σ_g + ε) for the best of each group, 0 for the others.

    A tie for the best, and a group of one, give 0 throughout.
    Source: arXiv 2503.19595.
    """
    scores, groups = inputs.scores, inputs.groups
    best = groups.max(scores)[groups.index]
    is_best = (scores == best) & groups.rows
    unique = groups.sum(is_best.to(scores.dtype))[groups.index] == 1
    second = groups.max(scores.masked_fill(is_best, -torch.inf))[groups.index]
    leads = is_best & unique & second.isfinite()
    lead = torch.where(leads, best - second, torch.zeros_like(scores))
    if norm_adv_by_std_in_grpo:
        lead = safe_divide(lead, groups.std(scores)[groups.index] + epsilon)
    tokens = to_tokens(lead, inputs.response_mask)
    return AdvantageOutputs(tokens, tokens)
