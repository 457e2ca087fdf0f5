"""KL(π ‖ π_ref) exact over the vocabulary, in chunks of tokens.

Estimates from sampled tokens are in `algorithms.kl`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.algorithms.chunks import map_token_chunks
from engine.errors import DataError


def full_kl(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
) -> Tensor:
    """Σ_v π(v)·(log π(v) − log π_ref(v)) of logits `[..., V]` → `[...]`, float32 or float64.

    The gradient is exact, and none flows to the reference. Softmaxes exist for `chunk_tokens`
    tokens at a time, in the backward pass too. Where `mask [...]` is 0 the result is 0.
    Raises DataError for unequal shapes.
    """
    if logits.shape != ref_logits.shape:
        raise DataError(
            f"logits {list(logits.shape)} and ref_logits {list(ref_logits.shape)} differ in shape"
        )

    def chunk(ours: Tensor, theirs: Tensor) -> Tensor:
        return _kl(ours, theirs, temperature)

    return map_token_chunks(chunk, (logits, ref_logits.detach()), mask, chunk_tokens)


def _kl(logits: Tensor, ref_logits: Tensor, temperature: float) -> Tensor:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    ours = torch.log_softmax(logits.to(wide) / temperature, -1)
    theirs = torch.log_softmax(ref_logits.to(wide) / temperature, -1)
    # A token that neither can sample (logit −inf, e.g. a padded vocabulary) adds 0, not NaN.
    possible = ours > -torch.inf
    gap = torch.where(possible, ours, 0.0) - torch.where(possible, theirs, 0.0)
    return (ours.exp() * gap).sum(-1)
