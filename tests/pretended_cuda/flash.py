"""The attention kernel for rows of different lengths, which torch has for CUDA alone.

It refuses what the real one refuses (dtypes, widths, strides, starts that aren't int32) and gives
what it gives, row by row and by the book (arXiv:2205.14135, section 2.2 and appendix B.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
) -> None:
    for tensor in (query, key, value):
        assert tensor.is_cuda
        assert tensor.dtype in (torch.float16, torch.bfloat16), tensor.dtype
        assert tensor.stride(-1) == 1
        assert tensor.shape[-1] % 8 == 0
        assert tensor.shape[-1] <= 256
    for each, tokens, most in zip(starts, (query, key), longest, strict=True):
        assert each.is_cuda
        assert each.dtype == torch.int32
        assert each[-1] == len(tokens)
        assert each.diff().max() <= most
    assert len(key) == len(value)


def _rows(starts: Tensor, key_starts: Tensor) -> Iterator[tuple[slice, slice]]:
    """Each row's queries and keys."""
    ends = (pairwise(each.tolist()) for each in (starts, key_starts))
    return ((slice(*q), slice(*k)) for q, k in zip(*ends, strict=True))


def _probabilities(
    query: Tensor, key: Tensor, scale: float, left: int | None, right: int | None
) -> Tensor:
    """Weights `[heads, n, m]` of a row's keys: j counts for query i if -left ≤ j - i ≤ right.

    Of fewer queries than keys, the last query is at the last key (flash-attention from 2.1 on).
    """
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    at = torch.arange(len(key), device=query.device)
    ahead = at[None] - at[len(key) - len(query) :, None]
    for bound, far in ((right, ahead), (left, -ahead)):
        if bound is not None and bound >= 0:
            scores = scores.masked_fill(far > bound, -torch.inf)
    return scores.softmax(-1)


def _window(options: dict[str, Any], is_causal: bool) -> tuple[int | None, int | None]:
    right = 0 if is_causal else options.get("window_size_right")
    return options.get("window_size_left"), right


def _widened(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, longest: int,
    key_longest: int, dropout: float, is_causal: bool, return_debug_mask: bool, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `aten::_flash_attention_forward`: query [T, heads, d], key and value [T, kv_heads, d]."""
    _check(query, key, value, (starts, key_starts), (longest, key_longest))
    heads, out = query.shape[1], torch.empty_like(query)
    window = _window(options, is_causal)
    k, v = _widened(key, heads), _widened(value, heads).float()
    for row, seen in _rows(starts, key_starts):
        weights = _probabilities(query[row], k[seen], options["scale"], *window)
        out[row] = torch.einsum("hqk,khd->qhd", weights, v[seen]).to(out.dtype)
    unused = query.new_zeros(heads, len(query), dtype=torch.float32)
    return out, unused, starts.new_zeros(2, dtype=torch.uint64), unused, unused


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    starts: Tensor, key_starts: Tensor, longest: int, key_longest: int, dropout: float,
    is_causal: bool, state: Tensor, unused: Tensor, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `aten::_flash_attention_backward`: gradients of query, key and value."""
    _check(query, key, value, (starts, key_starts), (longest, key_longest))
    (_, heads, width), kv_heads = query.shape, key.shape[1]
    scale, window = options["scale"], _window(options, is_causal)
    k, v = _widened(key, heads), _widened(value, heads).float()
    grads = [torch.zeros_like(t, dtype=torch.float32) for t in (query, k, v)]
    for row, seen in _rows(starts, key_starts):
        weights, g = _probabilities(query[row], k[seen], scale, *window), grad[row].float()
        of_weights = torch.einsum("qhd,khd->hqk", g, v[seen])
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
        grads[0][row] = torch.einsum("hqk,khd->qhd", of_scores, k[seen].float())
        grads[1][seen] = torch.einsum("hqk,qhd->khd", of_scores, query[row].float())
        grads[2][seen] = torch.einsum("hqk,qhd->khd", weights, g)
    of_kv = (g.view(len(g), kv_heads, heads // kv_heads, width).sum(2) for g in grads[1:])
    return tuple(g.to(query.dtype) for g in (grads[0], *of_kv))


def install() -> None:
    global _library  # torch forgets the kernels with it
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("_flash_attention_forward", forward, "CUDA")
    _library.impl("_flash_attention_backward", backward, "CUDA")
