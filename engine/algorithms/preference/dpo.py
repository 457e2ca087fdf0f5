"""DPO: logistic loss on the difference of implicit rewards."""

from torch.nn.functional import logsigmoid

from engine.algorithms.preference._base import (
    Pairs,
    PreferenceOutput,
    register_pair_loss,
    reward_metrics,
)


@register_pair_loss("sigmoid", "dpo")
def sigmoid(
    pairs: Pairs,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    length_normalize: bool = False,
) -> PreferenceOutput:
    """−(1−ε)·log σ(βh) − ε·log σ(−βh), h = log-ratio of chosen − log-ratio of rejected, `[B]`.

    ε > 0 (conservative DPO): labels are wrong with that probability. `length_normalize` divides
    each log-ratio by its length.
    Source: Rafailov et al., arXiv 2305.18290, eq. 7; lengths: Tülu 3, arXiv 2411.15124.
    """
    chosen, rejected = pairs.log_ratios(length_normalize)
    logits = beta * (chosen - rejected)
    loss = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    return PreferenceOutput(loss, reward_metrics(beta * chosen, beta * rejected))
