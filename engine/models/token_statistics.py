"""What is read off logits for each token: log-prob, entropy, Σπ² and the exact KL.

The same off hidden states, without logits of a whole batch: `chunked_head`; off logits that ranks
share: `engine.parallel.vocab_parallel`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.algorithms.kl_full import full_kl


class TokenStatistics(Protocol):
    """Statistics of softmax(logits / temperature) for each token, from what this rank has of the
    logits.

    Takes logits `[N, V]` and targets `[N]`; returns float32 `[N]` by the names of TokenOutputs:
    `log_probs` always; `entropy` (with a gradient if `entropy_gradient`) and `sum_pi_squared`
    (never with one) where asked for; `full_kl` where `reference_logits [N, V]` are given, to which
    no gradient flows.
    """

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        *,
        entropy: bool = False,
        entropy_gradient: bool = False,
        sum_pi_squared: bool = False,
        reference_logits: Tensor | None = None,
    ) -> dict[str, Tensor]: ...


def token_statistics(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy: bool = False,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
    reference_logits: Tensor | None = None,
) -> dict[str, Tensor]:
    """The statistics of logits over the whole vocabulary."""
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    log_softmax = logits.log_softmax(-1)
    out = {"log_probs": log_softmax.gather(1, targets[:, None]).squeeze(1)}
    spread = log_softmax if entropy_gradient else log_softmax.detach()
    if entropy:
        # Entries that can't be sampled (logit −inf) add 0, not NaN.
        out["entropy"] = -(spread.exp() * torch.where(spread > -torch.inf, spread, 0.0)).sum(-1)
    if sum_pi_squared:
        out["sum_pi_squared"] = spread.detach().exp().square().sum(-1)
    if reference_logits is not None:
        out["full_kl"] = full_kl(logits, reference_logits.float() / temperature)
    return out
