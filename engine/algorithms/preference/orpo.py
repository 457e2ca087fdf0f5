"""ORPO: supervised loss plus a log-odds ratio, no reference."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from engine.algorithms.metrics import accumulate_mean
from engine.algorithms.preference._base import (
    Pairs,
    PreferenceOutput,
    register_pair_loss,
    reward_metrics,
)


@register_pair_loss("orpo", needs_reference=False)
def orpo(pairs: Pairs, *, beta: float = 0.1) -> PreferenceOutput:
    """−log p(chosen) − β·log σ(log odds(chosen) − log odds(rejected)), `[B]`.

    p is the geometric-mean probability of a token, odds = p/(1 − p); β is the paper's λ.
    Source: Hong et al., arXiv 2403.07691, eq. 6 to 7.
    """
    chosen, rejected = pairs.per_token()
    log_odds = (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))
    preference = -logsigmoid(log_odds)
    metrics = reward_metrics(beta * chosen, beta * rejected)
    metrics |= {
        "nll_loss": accumulate_mean(-chosen, torch.ones_like(chosen)),
        "log_odds_ratio": accumulate_mean(log_odds, torch.ones_like(chosen)),
    }
    return PreferenceOutput(-chosen + beta * preference, metrics)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 − e^x) for x ≤ 0, exact at both ends; x within a dtype's epsilon of 0 is moved off it.

    Source: Mächler (2012), "Accurately computing log(1 − exp(−|a|))", eq. 7.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -0.6931471805599453
    # Each branch sees inputs of its own side only, so that neither makes a NaN gradient.
    small = torch.log(-torch.expm1(torch.where(near, x, torch.full_like(x, -0.5))))
    large = torch.log1p(-torch.exp(torch.where(near, torch.full_like(x, -1.0), x)))
    return torch.where(near, small, large)
