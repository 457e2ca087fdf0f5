"""REINFORCE: log-probability times advantage."""

from torch import Tensor

from engine.algorithms.losses._base import LossOutput, register_policy_loss


@register_policy_loss("reinforce")
def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> LossOutput:
    """−A·log π. No trust region: for one update a batch, or with importance weights.

    Source: Williams (1992); with rollout weights, the policy gradient of verl's bypass mode.
    """
    return LossOutput(-advantages * log_probs)
