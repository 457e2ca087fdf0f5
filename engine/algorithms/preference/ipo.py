"""IPO: a squared loss that pulls the difference to a finite target."""

from engine.algorithms.preference._base import (
    Pairs,
    PreferenceOutput,
    register_pair_loss,
    reward_metrics,
)


@register_pair_loss("ipo")
def ipo(pairs: Pairs, *, beta: float = 0.1, length_normalize: bool = True) -> PreferenceOutput:
    """(h − 1/(2β))², `[B]`: the difference is not driven to infinity on certain preferences.

    By default h is of log-ratios a token, as its authors advise and TRL does; the paper's formula
    has whole responses (`length_normalize=False`).
    Source: Azar et al., arXiv 2310.12036, eq. 17.
    """
    chosen, rejected = pairs.log_ratios(length_normalize)
    loss = (chosen - rejected - 1 / (2 * beta)).square()
    return PreferenceOutput(loss, reward_metrics(beta * chosen, beta * rejected))
