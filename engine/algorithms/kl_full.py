"""KL(π ‖ π_ref) exact over the vocabulary, in chunks of tokens.

What lives here: the divergence from logits, and from hidden states and the output matrix.
What does not: estimates from sampled tokens (`algorithms.kl`).
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


def full_kl_from_hidden(
    hidden: Tensor,
    output_weight: Tensor,
    ref_hidden: Tensor,
    ref_output_weight: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
) -> Tensor:
    """The same from last hidden states `[..., H]` and output matrices `[V, H]`: no logits kept.

    Logits exist for `chunk_tokens` tokens at a time. Gradient flows to `hidden` and
    `output_weight`. Raises DataError when shapes don't fit or vocabularies differ.
    """
    if hidden.shape[:-1] != ref_hidden.shape[:-1]:
        raise DataError(
            f"hidden {list(hidden.shape)} and ref_hidden {list(ref_hidden.shape)} hold different "
            "tokens"
        )
    if output_weight.shape[0] != ref_output_weight.shape[0]:
        raise DataError(
            f"policy and reference have vocabularies of {output_weight.shape[0]} and "
            f"{ref_output_weight.shape[0]}; KL needs one vocabulary"
        )
    ref_output_weight = ref_output_weight.detach()

    def chunk(ours: Tensor, theirs: Tensor) -> Tensor:
        return _kl(ours @ output_weight.T, theirs @ ref_output_weight.T, temperature)

    return map_token_chunks(chunk, (hidden, ref_hidden.detach()), mask, chunk_tokens)


def _kl(logits: Tensor, ref_logits: Tensor, temperature: float) -> Tensor:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    ours = torch.log_softmax(logits.to(wide) / temperature, -1)
    theirs = torch.log_softmax(ref_logits.to(wide) / temperature, -1)
    # A token that neither can sample (logit −inf, e.g. a padded vocabulary) adds 0, not NaN.
    possible = ours > -torch.inf
    gap = torch.where(possible, ours, 0.0) - torch.where(possible, theirs, 0.0)
    return (ours.exp() * gap).sum(-1)
