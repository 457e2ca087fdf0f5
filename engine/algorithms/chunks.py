"""Functions of single tokens over vocabulary-wide tensors, a bounded number of tokens at a time.

What lives here: flattening, masking, chunking and recomputation in the backward pass.
What does not: what is computed (`kl_full`, `entropy`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def map_token_chunks(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    mask: Tensor | None,
    chunk_tokens: int,
) -> Tensor:
    """Apply `function([n, X], …) -> [n]` to inputs `[..., X]`, giving `[...]`.

    Only tokens inside `mask [...]` are computed; the others give 0 and get gradient 0, even where
    inputs hold NaN. Intermediates of `function` are recomputed in the backward pass, so that at
    most `chunk_tokens` rows of them exist at once.
    """
    shape = inputs[0].shape[:-1]
    rows = [x.reshape(-1, x.shape[-1]) for x in inputs]
    if mask is not None:
        inside = mask.reshape(-1).bool().nonzero().squeeze(1)
        rows = [x.index_select(0, inside) for x in rows]
    pieces = [
        checkpoint(function, *parts, use_reentrant=False)
        for parts in zip(*(x.split(chunk_tokens) for x in rows), strict=True)
        if parts[0].shape[0]
    ]
    if not pieces:
        return torch.zeros(shape, device=rows[0].device, dtype=torch.float32)
    out = torch.cat(pieces)
    if mask is None:
        return out.reshape(shape)
    full = torch.zeros(mask.numel(), dtype=out.dtype, device=out.device)
    return full.index_put((inside,), out).reshape(shape)
