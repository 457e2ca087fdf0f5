"""GPG: the plain policy gradient that goes with the `gpg` advantage."""

from torch import Tensor

from engine.algorithms.losses._base import LossOutput, register_policy_loss


@register_policy_loss("gpg")
def gpg(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> LossOutput:
    """−A·log π: REINFORCE under GPG's name, as in verl.

    Source: Chu et al., arXiv 2504.02546.
    """
    return LossOutput(-advantages * log_probs)
