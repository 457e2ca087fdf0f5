"""Robust DPO: unbiased under labels that are flipped with a known probability."""

from torch.nn.functional import logsigmoid

from engine.algorithms.preference._base import (
    Pairs,
    PreferenceOutput,
    register_pair_loss,
    reward_metrics,
)


@register_pair_loss("robust")
def robust(
    pairs: Pairs,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
    length_normalize: bool = False,
) -> PreferenceOutput:
    """(−(1−ε)·log σ(βh) + ε·log σ(−βh))/(1 − 2ε), h as in DPO, ε = `label_smoothing`, `[B]`.

    Source: Chowdhury et al., arXiv 2403.00409.
    """
    chosen, rejected = pairs.log_ratios(length_normalize)
    logits = beta * (chosen - rejected)
    loss = -(1 - label_smoothing) * logsigmoid(logits) + label_smoothing * logsigmoid(-logits)
    loss = loss / (1 - 2 * label_smoothing)
    return PreferenceOutput(loss, reward_metrics(beta * chosen, beta * rejected))
