"""SimPO: the mean log-prob of a token as the reward, with a margin and no reference."""

from torch.nn.functional import logsigmoid

from engine.algorithms.preference._base import (
    Pairs,
    PreferenceOutput,
    register_pair_loss,
    reward_metrics,
)
from engine.errors import ConfigError


def _check(*, simpo_gamma: float, **_: object) -> None:
    if simpo_gamma < 0:
        raise ConfigError(f"simpo_gamma={simpo_gamma} must not be negative")


@register_pair_loss("simpo", needs_reference=False, validate=_check)
def simpo(
    pairs: Pairs, *, beta: float = 2.0, simpo_gamma: float = 0.5, label_smoothing: float = 0.0
) -> PreferenceOutput:
    """−log σ(β·(log π(chosen)/len − log π(rejected)/len) − γ), `[B]`; ε as in conservative DPO.

    Source: Meng et al., arXiv 2405.14734, eq. 6.
    """
    chosen, rejected = pairs.per_token()
    logits = beta * (chosen - rejected) - simpo_gamma
    loss = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    return PreferenceOutput(loss, reward_metrics(beta * chosen, beta * rejected))
