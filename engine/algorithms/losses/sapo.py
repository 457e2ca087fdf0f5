"""SAPO: a smooth gate in place of the clip."""

import torch
from torch import Tensor

from engine.algorithms.losses._base import LossOutput, register_policy_loss
from engine.algorithms.losses._ratio import log_ratio
from engine.errors import ConfigError


def _check(*, tau_pos: float, tau_neg: float, **_: object) -> None:
    for name, value in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if value <= 0:
            raise ConfigError(f"{name}={value} must be above 0; the paper has 1.0 and 1.05")


@register_policy_loss("sapo", default_mode="seq-mean-token-mean", validate=_check)
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> LossOutput:
    """−A·(4/τ)·σ(τ(ρ − 1)), τ = tau_pos where A > 0, else tau_neg.

    At ρ = 1 the gradient is that of Aρ; away from it, it fades smoothly. `tau_neg > tau_pos`
    fades negative advantages sooner.
    Source: Gao et al., arXiv 2511.20347.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    return LossOutput(-advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)))
