"""The reward model's loss: the chosen response should score higher."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from engine.algorithms.masked import at_least_float
from engine.algorithms.preference._base import PreferenceOutput, reward_metrics
from engine.errors import ConfigError, DataError


def bradley_terry(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    margin: Tensor | None = None,
    *,
    center_rewards_coefficient: float = 0.0,
) -> PreferenceOutput:
    """−log σ(s_chosen − s_rejected − margin) + c·(s_chosen + s_rejected)², all `[B]`.

    The second term keeps scores around 0, which the first leaves open.
    Source: Llama 2, arXiv 2307.09288, eq. 2; centring: Eisenstein et al., arXiv 2312.09244.
    Raises ConfigError for a negative coefficient, DataError for unequal shapes.
    """
    if center_rewards_coefficient < 0:
        raise ConfigError(
            f"center_rewards_coefficient={center_rewards_coefficient} must not be negative"
        )
    shapes = {tuple(t.shape) for t in (chosen_scores, rejected_scores, margin) if t is not None}
    if len(shapes) != 1:
        raise DataError(f"chosen_scores, rejected_scores and margin differ in shape: {shapes}")
    chosen, rejected = at_least_float(chosen_scores), at_least_float(rejected_scores)
    gap = chosen - rejected
    if margin is not None:
        gap = gap - at_least_float(margin.detach())
    loss = -logsigmoid(gap) + center_rewards_coefficient * (chosen + rejected).square()
    return PreferenceOutput(loss, reward_metrics(chosen, rejected))
