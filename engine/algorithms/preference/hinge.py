"""Hinge loss on the difference of implicit rewards."""

from engine.algorithms.preference._base import (
    Pairs,
    PreferenceOutput,
    register_pair_loss,
    reward_metrics,
)


@register_pair_loss("hinge")
def hinge(pairs: Pairs, *, beta: float = 0.1, length_normalize: bool = False) -> PreferenceOutput:
    """max(0, 1 − βh), h as in DPO, `[B]`: pairs beyond the margin stop pulling.

    Source: SLiC-HF, arXiv 2305.10425, and RSO, arXiv 2309.06657.
    """
    chosen, rejected = pairs.log_ratios(length_normalize)
    loss = (1 - beta * (chosen - rejected)).clamp(min=0)
    return PreferenceOutput(loss, reward_metrics(beta * chosen, beta * rejected))
