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


def _check(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int) -> None:
    for tensor in (query, key, value):
        assert tensor.is_cuda
        assert tensor.dtype in (torch.float16, torch.bfloat16), tensor.dtype
        assert tensor.stride(-1) == 1
        assert tensor.shape[-1] % 8 == 0
        assert tensor.shape[-1] <= 256
    assert starts.is_cuda
    assert starts.dtype == torch.int32
    assert starts[-1] == len(query)
    assert starts.diff().max() <= longest


def _rows(starts: Tensor) -> Iterator[slice]:
    return (slice(a, b) for a, b in pairwise(starts.tolist()))


def _probabilities(
    query: Tensor, key: Tensor, scale: float, left: int | None, right: int | None
) -> Tensor:
    """Weights `[heads, T, T]` of a row's keys: j counts for query i if -left ≤ j - i ≤ right."""
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    at = torch.arange(len(query), device=query.device)
    ahead = at[None] - at[:, None]
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
    _check(query, key, value, starts, longest)
    heads, out = query.shape[1], torch.empty_like(query)
    window = _window(options, is_causal)
    k, v = _widened(key, heads), _widened(value, heads).float()
    for row in _rows(starts):
        weights = _probabilities(query[row], k[row], options["scale"], *window)
        out[row] = torch.einsum("hqk,khd->qhd", weights, v[row]).to(out.dtype)
    unused = query.new_zeros(heads, len(query), dtype=torch.float32)
    return out, unused, starts.new_zeros(2, dtype=torch.uint64), unused, unused


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    starts: Tensor, key_starts: Tensor, longest: int, key_longest: int, dropout: float,
    is_causal: bool, state: Tensor, unused: Tensor, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `aten::_flash_attention_backward`: gradients of query, key and value."""
    _check(query, key, value, starts, longest)
    (_, heads, width), kv_heads = query.shape, key.shape[1]
    scale, window = options["scale"], _window(options, is_causal)
    k, v = _widened(key, heads), _widened(value, heads).float()
    grads = [torch.zeros_like(query, dtype=torch.float32) for _ in range(3)]
    for row in _rows(starts):
        weights, g = _probabilities(query[row], k[row], scale, *window), grad[row].float()
        of_weights = torch.einsum("qhd,khd->hqk", g, v[row])
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
        grads[0][row] = torch.einsum("hqk,khd->qhd", of_scores, k[row].float())
        grads[1][row] = torch.einsum("hqk,qhd->khd", of_scores, query[row].float())
        grads[2][row] = torch.einsum("hqk,qhd->khd", weights, g)
    of_kv = (g.view(len(g), kv_heads, heads // kv_heads, width).sum(2) for g in grads[1:])
    return tuple(g.to(query.dtype) for g in (grads[0], *of_kv))


def install() -> None:
    global _library  # torch forgets the kernels with it
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("_flash_attention_forward", forward, "CUDA")
    _library.impl("_flash_attention_backward", backward, "CUDA")
