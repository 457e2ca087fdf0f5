"""Attention of packed rows that share nothing, as matrix products over padded batches of them.

Rows of similar length are computed together: a few operations a layer, where a pass over the rows
(`packed_attention`) is some for each of them. For short rows on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.algorithms.masked import at_least_float

Run = tuple[int, int, int, int]  # first and last + 1 of a segment's prefix, and of the segment

_LONGEST = 256  # tokens of a row
_SCORES = 1 << 18  # of a batch, a head
_LONGER = 1.2  # than the shortest row of a batch the longest may be,
_NEAR = 8  # or by so many tokens


@dataclass(frozen=True, slots=True)
class _Batch:
    """B rows of up to L tokens, padded on the right."""

    rows: int
    index: Tensor  # [B · L] long; the token at each place; padding has any
    real: Tensor  # [B · L, 1, 1]; 1 at a token, 0 at padding
    unseen: Tensor  # [L, L]; -inf where a key is behind its query, else 0


@dataclass(frozen=True, slots=True)
class _Plan:
    batches: list[_Batch]
    places: Tensor  # [T] long; of each token among those of all batches


@functools.lru_cache(maxsize=4)
def _plan(runs: tuple[Run, ...], device: torch.device) -> _Plan:
    places = np.empty(max(run[3] for run in runs), dtype=np.int64)
    batches, first = [], 0
    for rows in _similar(runs):
        longest = max(map(_length, rows))
        index = np.zeros((len(rows), longest), dtype=np.int64)
        real = np.zeros(index.shape, dtype=np.float32)
        for row, (_, _, start, stop) in enumerate(rows):
            index[row, : stop - start] = np.arange(start, stop)
            real[row, : stop - start] = 1.0
            places[start:stop] = first + row * longest + np.arange(stop - start)
        batches.append(
            _Batch(
                len(rows),
                torch.from_numpy(index.ravel()).to(device),
                torch.from_numpy(real.reshape(-1, 1, 1)).to(device),
                torch.full((longest, longest), -torch.inf, device=device).triu_(1),
            )
        )
        first += index.size
    return _Plan(batches, torch.from_numpy(places).to(device))


def _similar(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """The rows in batches of similar length."""
    batch: list[Run] = []
    for run in sorted(runs, key=_length):
        length = _length(run)
        shortest = _length(batch[0]) if batch else length
        too_many = (len(batch) + 1) * length**2 > _SCORES
        if batch and (too_many or length > max(_LONGER * shortest, shortest + _NEAR)):
            yield sorted(batch)
            batch = []
        batch.append(run)
    if batch:
        yield sorted(batch)


def _length(run: Run) -> int:
    return run[3] - run[2]


def takes_rows(runs: tuple[Run, ...], device: torch.device) -> bool:
    """Whether `row_attention` computes these rows in less time than a pass over them would."""
    return device.type == "cpu" and all(
        start == stop and _length((start, stop, first, last)) <= _LONGEST
        for start, stop, first, last in runs
    )


def row_attention(
    query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float
) -> Tensor:
    """Attention [1, T, heads, d] of queries [1, heads, T, d]; keys' heads may be fewer (GQA)."""
    out: Tensor = _Attention.apply(query, key, value, runs, scale)
    return out


class _Attention(torch.autograd.Function):
    """Keeps no padded tensors and no scores: the backward pass computes both again.

    In float32 at least. The equations are those of `packed_attention`.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float
    ) -> Tensor:
        plan, kv_heads = _plan(runs, query.device), key.shape[1]
        parts = []
        with torch.autocast(query.device.type, enabled=False):
            for batch in plan.batches:
                q, k, v = (_rows(batch, t, kv_heads) for t in (query, key, value))
                out = torch.bmm(_weights(batch, q, k, scale), v)
                parts.append(_flat(batch, out, query.shape[1]))
        attended = _tokens(plan, parts)[None].to(query.dtype)
        ctx.save_for_backward(query, key, value, attended)
        ctx.runs, ctx.scale = runs, scale
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        grad: Tensor = gradients[0]
        query, key, value, attended = ctx.saved_tensors
        plan, (heads, kv_heads) = _plan(ctx.runs, grad.device), (query.shape[1], key.shape[1])
        parts: list[list[Tensor]] = [[], [], []]
        with torch.autocast(grad.device.type, enabled=False):
            above = at_least_float(grad)
            sums = (at_least_float(attended) * above).sum(-1, keepdim=True)
            for batch in plan.batches:
                q, k, v = (_rows(batch, t, kv_heads) for t in (query, key, value))
                g = _rows(batch, above.transpose(1, 2), kv_heads, real=True)
                of_sum = _rows(batch, sums.transpose(1, 2), kv_heads, real=True)
                weights = _weights(batch, q, k, ctx.scale)
                scores = torch.bmm(g, v.transpose(1, 2))
                scores.sub_(of_sum).mul_(weights).mul_(ctx.scale)
                parts[0].append(_flat(batch, torch.bmm(scores, k), heads))
                parts[1].append(_flat(batch, torch.bmm(scores.transpose(1, 2), q), kv_heads))
                parts[2].append(_flat(batch, torch.bmm(weights.transpose(1, 2), g), kv_heads))
            totals = [_tokens(plan, part) for part in parts]
        given = zip(totals, (query, key, value), strict=True)
        return *(t.transpose(0, 1)[None].to(like.dtype) for t, like in given), None, None


def _weights(batch: _Batch, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Probabilities [B · kv heads, g · L, L]."""
    scores = torch.baddbmm(
        queries.new_empty(()), queries, keys.transpose(1, 2), beta=0, alpha=scale
    )
    scores.unflatten(1, (-1, keys.shape[1])).add_(batch.unseen)
    return torch.softmax(scores, -1)


def _rows(batch: _Batch, tokens: Tensor, kv_heads: int, *, real: bool = False) -> Tensor:
    """Of [1, g · kv heads, T, d] the rows [B · kv heads, g · L, d], float32 at least.

    `real`: with 0 in place of padding.
    """
    found = at_least_float(tokens[0].transpose(0, 1).index_select(0, batch.index))
    if real:
        found.mul_(batch.real)
    rows = found.view(batch.rows, -1, kv_heads, tokens.shape[1] // kv_heads, tokens.shape[3])
    return rows.permute(0, 2, 3, 1, 4).reshape(batch.rows * kv_heads, -1, tokens.shape[3])


def _flat(batch: _Batch, rows: Tensor, heads: int) -> Tensor:
    """[B · kv heads, g · L, d] as [B · L, heads, d]."""
    by_head = rows.view(batch.rows, heads, -1, rows.shape[2])
    return by_head.transpose(1, 2).reshape(-1, heads, rows.shape[2])


def _tokens(plan: _Plan, parts: Sequence[Tensor]) -> Tensor:
    """[T, heads, d] of all batches' places."""
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).index_select(0, plan.places)
