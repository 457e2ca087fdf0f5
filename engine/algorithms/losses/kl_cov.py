"""KL-Cov: policy gradient, with a KL penalty on the tokens of highest covariance."""

import torch
from torch import Tensor

from engine.algorithms.losses._base import LossOutput, register_policy_loss
from engine.algorithms.losses._covariance import token_covariance
from engine.algorithms.losses._ratio import fraction, log_ratio
from engine.algorithms.masked import mask_out
from engine.errors import ConfigError


def _select(
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    generator: torch.Generator | None,
    *,
    kl_cov_ratio: float = 0.0002,
) -> dict[str, Tensor]:
    """Take the max(1, ratio·N) tokens of the highest covariance."""
    tokens = int(mask.sum())
    count = min(tokens, max(1, int(kl_cov_ratio * tokens)))
    covariance = token_covariance(old_log_probs, advantages, mask)
    ranked = mask_out(mask, covariance, -torch.inf).flatten()
    chosen = torch.zeros_like(ranked, dtype=torch.bool)
    chosen[ranked.topk(count).indices] = True
    return {"cov_selected": chosen.view(mask.shape)}


def _check(*, kl_cov_ratio: float, ppo_kl_coef: float, **_: object) -> None:
    if not 0 < kl_cov_ratio <= 1:
        raise ConfigError(f"kl_cov_ratio={kl_cov_ratio} must be above 0 and at most 1")
    if ppo_kl_coef < 0:
        raise ConfigError(f"ppo_kl_coef={ppo_kl_coef} must not be negative")


@register_policy_loss(
    "kl_cov", regularized=True, prepare=_select, prepared=("cov_selected",), validate=_check
)
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cov_selected: Tensor,
    ppo_kl_coef: float = 1.0,
) -> LossOutput:
    """−Aρ, plus coef·|Δ| on the tokens in `cov_selected [B, T]` (from `losses.prepare`).

    Source: Cui et al., arXiv 2505.22617.
    """
    delta = log_ratio(log_probs, old_log_probs)
    loss = -advantages * delta.exp() + mask_out(cov_selected, ppo_kl_coef * delta.abs())
    return LossOutput(loss, {"cov_selected_frac": fraction(cov_selected, mask)})
