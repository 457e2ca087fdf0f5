"""DRO: policy gradient with a quadratic pull to the old policy."""

from torch import Tensor

from engine.algorithms.losses._base import LossOutput, register_policy_loss
from engine.algorithms.losses._ratio import log_ratio
from engine.errors import ConfigError


def _check(*, dro_beta: float, **_: object) -> None:
    if dro_beta <= 0:
        raise ConfigError(
            f"dro_beta={dro_beta} must be above 0; for no pull use loss_mode=reinforce"
        )


@register_policy_loss("dro", regularized=True, validate=_check)
def dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    dro_beta: float = 0.1,
) -> LossOutput:
    """−(A·log π − β/2·Δ²): no ratio, so old data can't blow it up.

    Source: Richemond et al., arXiv 2405.19107, with the advantage in place of r − V.
    """
    delta = log_ratio(log_probs, old_log_probs)
    return LossOutput(-(advantages * log_probs - 0.5 * dro_beta * delta.square()))
