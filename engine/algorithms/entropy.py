"""Entropy of next-token distributions, and the sum of their squared probabilities.

What lives here: both from logits, in chunks of tokens. What does not: the entropy bonus, which is
`−entropy_coeff ·` the aggregated entropy in the actor's loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.algorithms.chunks import map_token_chunks
from engine.algorithms.masked import at_least_float


def entropy(
    logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
) -> Tensor:
    """−Σ_v π(v)·log π(v) in nats of logits `[..., V]` → `[...]`, with its exact gradient.

    Softmaxes exist for `chunk_tokens` tokens at a time, in the backward pass too. Tokens with
    logit −inf add 0. Where `mask [...]` is 0 the result is 0.
    """

    def chunk(part: Tensor) -> Tensor:
        log_probs = torch.log_softmax(at_least_float(part) / temperature, -1)
        possible = log_probs > -torch.inf
        return -(log_probs.exp() * torch.where(possible, log_probs, 0.0)).sum(-1)

    return map_token_chunks(chunk, (logits,), mask, chunk_tokens)


def sum_pi_squared(
    logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
) -> Tensor:
    """Σ_v π(v)² of logits `[..., V]` → `[...]`, for the optimal token baseline."""

    def chunk(part: Tensor) -> Tensor:
        return torch.softmax(at_least_float(part) / temperature, -1).square().sum(-1)

    return map_token_chunks(chunk, (logits,), mask, chunk_tokens)
