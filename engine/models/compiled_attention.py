"""Causal attention over packed rows as one compiled function: `cpu/attention.h`.

In bfloat16 on CPUs that multiply it (AVX512-BF16): each thread takes the rows that share a prompt,
one key head of them at a time, and keeps their keys in its cache. Scores and sums are float32.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.models.cpu_kernels import library
from engine.models.row_attention import Run, is_tree

_LONGEST = 1024  # keys of a token


class _Heads(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("token", c_int64), ("head", c_int64)]


_COUNTS = ("count", "longest", "heads", "kv_heads", "d", "threads")
_TENSORS = ("q", "k", "v", "out", "of_q", "of_k", "of_v")


class _Call(ctypes.Structure):
    _fields_ = [
        ("runs", c_void_p),
        ("groups", c_void_p),
        *((name, c_int64) for name in _COUNTS),
        ("scale", c_double),
        *((name, _Heads) for name in _TENSORS),
    ]


@lru_cache(maxsize=4)
def _groups(runs: tuple[Run, ...]) -> tuple[Tensor, Tensor, int] | None:
    """The runs int64 [S, 4], where groups begin among them [G + 1], the keys of a run at most;
    None of a tree."""
    if is_tree(runs):
        return None
    keys = itertools.groupby(runs, lambda run: run[0] if run[0] < run[1] else run[2])
    sizes = [len(list(group)) for _, group in keys]
    longest = max(sum(run[1::2]) - sum(run[::2]) for run in runs)
    return torch.tensor(runs), torch.tensor([0, *itertools.accumulate(sizes)]), longest


def takes_compiled(query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...]) -> bool:
    """Whether `compiled_attention` computes this, and with all threads: see `packed_attention`."""
    every = (query, key, value)
    if not all(t.dtype == torch.bfloat16 and t.device.type == "cpu" for t in every):
        return False
    if any(t.stride(3) != 1 for t in every) or library() is None:
        return False
    if (laid := _groups(runs)) is None:
        return False
    _, groups, longest = laid
    return longest <= _LONGEST and (len(groups) - 1) * key.shape[1] >= torch.get_num_threads()


def compiled_attention(
    query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float
) -> Tensor:
    """Attention [1, T, heads, d] of queries [1, heads, T, d]; keys' heads may be fewer (GQA)."""
    out: Tensor = _Attention.apply(query, key, value, runs, scale)
    return out


class _Attention(torch.autograd.Function):
    """Keeps no scores: the backward pass computes the probabilities again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.runs, ctx.scale = runs, scale
        out = _like(query)
        _attend(runs, scale, [query, key, value, out.transpose(1, 2)])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        [above], every = gradients, list(ctx.saved_tensors)
        above = above if above.stride(3) == 1 else above.contiguous()
        found = [_like(tensor).transpose(1, 2) for tensor in every]
        _attend(ctx.runs, ctx.scale, [*every, above.transpose(1, 2), *found])
        return *found, None, None


def _like(tensor: Tensor) -> Tensor:
    """Room for [1, heads, T, d] as [1, T, heads, d]."""
    return tensor.new_empty(1, tensor.shape[2], tensor.shape[1], tensor.shape[3])


def _attend(runs: tuple[Run, ...], scale: float, tensors: Sequence[Tensor]) -> None:
    """Forward of four tensors [1, heads, T, d], backward of seven."""
    found, plan = library(), _groups(runs)
    assert found is not None  # `takes_compiled` was asked
    assert plan is not None
    laid, groups, longest = plan
    (_, heads, _, d), kv_heads = tensors[0].shape, tensors[1].shape[1]
    call = _Call(
        laid.data_ptr(), groups.data_ptr(), len(groups) - 1, longest, heads, kv_heads, d,
        torch.get_num_threads(), scale,
        *(_Heads(t.data_ptr(), t.stride(2), t.stride(1)) for t in tensors),
    )  # fmt: skip
    if not found.packed_attention(ctypes.byref(call), len(tensors) > 4):
        raise MemoryError("no memory for attention: give micro-batches fewer tokens")
