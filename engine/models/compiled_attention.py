"""Causal attention over packed rows as one compiled function: `cpu/attention.h`.

In bfloat16 on CPUs that multiply it (AVX512-BF16): each thread takes the rows that share a prompt
or more, one key head of them at a time, and keeps their keys in its cache. Scores and sums are
float32.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.models.cpu_kernels import library
from engine.models.row_attention import Run

_LONGEST = 1024  # keys of a token


class _Heads(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("token", c_int64), ("head", c_int64)]


_COUNTS = ("count", "longest", "heads", "kv_heads", "d", "threads")
_TENSORS = ("q", "k", "v", "out", "of_q", "of_k", "of_v")


class _Call(ctypes.Structure):
    _fields_ = [
        ("runs", c_void_p),
        ("trees", c_void_p),
        *((name, c_int64) for name in _COUNTS),
        ("scale", c_double),
        *((name, _Heads) for name in _TENSORS),
        ("softmax", c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Runs as the C function takes them."""

    runs: Tensor  # int64 [S, 3]; tokens before each, its first and last + 1
    trees: Tensor  # int64 [G + 1]; where those begin that have none before, and S
    longest: int  # keys of a run at most


_recent: deque[tuple[tuple[Run, ...], _Plan | None]] = deque(maxlen=4)


def _plan(runs: tuple[Run, ...]) -> _Plan | None:
    """Of runs each of which begins with what is left of the path to the one before it; else None.

    All layers ask for the same ones, so that to compare them would take longer than to attend.
    """
    for known, plan in tuple(_recent):
        if known is runs:
            return plan
    plan = _laid_out(runs)
    _recent.append((runs, plan))
    return plan


def _laid_out(runs: tuple[Run, ...]) -> _Plan | None:
    path: list[tuple[int, Run]] = []  # how many tokens there are up to the end of each run, which
    table: list[tuple[int, int, int]] = []
    for run in runs:
        *_, start, end = run
        before = sum(run[1:-2:2]) - sum(run[:-2:2])
        while path and path[-1][0] > before:
            path.pop()
        prefix = path[-1][1] if path else ()
        if before and run[:-2] != prefix:
            return None
        joined = prefix and prefix[-1] == start
        parts = (*prefix[:-1], end) if joined else (*prefix, start, end)
        path.append((before + end - start, parts))
        table.append((before, start, end))
    trees = [at for at, (before, *_) in enumerate(table) if not before]
    longest = max(before + end - start for before, start, end in table)
    return _Plan(torch.tensor(table), torch.tensor([*trees, len(table)]), longest)


def takes_compiled(query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...]) -> bool:
    """Whether `compiled_attention` computes this, and with all threads: see `packed_attention`."""
    every = (query, key, value)
    if not all(t.dtype == torch.bfloat16 and t.device.type == "cpu" for t in every):
        return False
    return all(map(_in_words, every)) and library() is not None and takes_runs(runs, key.shape[1])


def takes_runs(runs: tuple[Run, ...], kv_heads: int) -> bool:
    """Whether rows are short enough, and enough for all threads."""
    if (plan := _plan(runs)) is None or plan.longest > _LONGEST:
        return False
    return (len(plan.trees) - 1) * kv_heads >= torch.get_num_threads()


def compiled_attention(
    query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float
) -> Tensor:
    """Attention [1, T, heads, d] of queries [1, heads, T, d]; keys' heads may be fewer (GQA)."""
    out: Tensor = _Attention.apply(query, key, value, runs, scale)
    return out


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float
) -> tuple[Tensor, Tensor]:
    """As `compiled_attention`, without a gradient; and what `attention_gradients` needs of it."""
    out = _like(query)
    softmax = torch.empty(*out.shape[1:3], 2)
    _attend(runs, scale, softmax, [query, key, value, out.transpose(1, 2)])
    return out, softmax


def attention_gradients(
    inputs: Sequence[Tensor],
    softmax: Tensor,
    above: Tensor,
    runs: tuple[Run, ...],
    scale: float,
) -> list[Tensor]:
    """Of query, key and value, the `inputs`, by that of the output: [1, T, heads, d] each."""
    found = [_like(tensor) for tensor in inputs]
    turned = [tensor.transpose(1, 2) for tensor in (above, *found)]
    _attend(runs, scale, softmax, [*inputs, *turned])
    return found


class _Attention(torch.autograd.Function):
    """Keeps two numbers a query of its scores: the backward pass computes the others again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float
    ) -> Tensor:
        out, softmax = attention_forward(query, key, value, runs, scale)
        ctx.save_for_backward(query, key, value, softmax)
        ctx.runs, ctx.scale = runs, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [above], (*inputs, softmax) = gradients, ctx.saved_tensors
        above = above if _in_words(above) else above.contiguous()
        found = attention_gradients(inputs, softmax, above, ctx.runs, ctx.scale)
        return *(tensor.transpose(1, 2) for tensor in found), None, None


def _in_words(tensor: Tensor) -> bool:
    """Whether neighbours in the last dimension can be read in twos."""
    return tensor.stride(3) == 1 and not any(size % 2 for size in tensor.stride()[1:3])


def _like(tensor: Tensor) -> Tensor:
    """Room for [1, heads, T, d] as [1, T, heads, d]."""
    return tensor.new_empty(1, tensor.shape[2], tensor.shape[1], tensor.shape[3])


def _attend(
    runs: tuple[Run, ...], scale: float, softmax: Tensor, tensors: Sequence[Tensor]
) -> None:
    """Forward of four tensors [1, heads, T, d], backward of seven."""
    found, plan = library(), _plan(runs)
    assert found is not None  # `takes_compiled` was asked
    assert plan is not None
    (_, heads, _, d), kv_heads = tensors[0].shape, tensors[1].shape[1]
    call = _Call(
        plan.runs.data_ptr(), plan.trees.data_ptr(), len(plan.trees) - 1, plan.longest,
        heads, kv_heads, d, torch.get_num_threads(), scale,
        *(_Heads(t.data_ptr(), t.stride(2), t.stride(1)) for t in tensors),
        softmax=softmax.data_ptr(),
    )  # fmt: skip
    if not found.packed_attention(ctypes.byref(call), len(tensors) > 4):
        raise MemoryError("no memory for attention: give micro-batches fewer tokens")
