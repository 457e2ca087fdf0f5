"""A language model as a reward model: its log-prob of a response is the score."""

from torch.nn.functional import logsigmoid

from engine.algorithms.preference._base import (
    Pairs,
    PreferenceOutput,
    register_pair_loss,
    reward_metrics,
)
from engine.errors import ConfigError


def _check(*, sft_weight: float, **_: object) -> None:
    if sft_weight < 0:
        raise ConfigError(f"sft_weight={sft_weight} must not be negative")


@register_pair_loss("likelihood", needs_reference=False, validate=_check)
def likelihood(
    pairs: Pairs, *, beta: float = 1.0, sft_weight: float = 1.0, label_smoothing: float = 0.0
) -> PreferenceOutput:
    """−log σ(β·(log π(chosen) − log π(rejected))) − w·log π(chosen)/len, `[B]`; ε as in DPO.

    Bradley-Terry's loss with log-probs as scores, and the language model's loss of the chosen
    response beside it, which keeps what the model knows.

    Source: of the second term, Yang et al. (GRM), arXiv 2406.10216, eq. 8.
    """
    chosen, rejected = pairs.policy_chosen, pairs.policy_rejected
    logits = beta * (chosen - rejected)
    loss = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    loss = loss - sft_weight * pairs.per_token()[0]
    return PreferenceOutput(loss, reward_metrics(beta * chosen, beta * rejected))
