"""Causal attention over packed rows: each token sees its own row's, a shared prompt among them.

On CUDA in half precision it is torch's variable-length flash kernel. Elsewhere (CPU, ROCm, float32)
it is a pass over the rows that keeps no scores; on the CPU `compiled_attention` of bfloat16, and
`row_attention` of other short rows. `packing` lays the rows out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.algorithms.masked import at_least_float
from engine.kernels import attention
from engine.kernels.attention import Run

_BLOCK = 256  # queries whose scores exist at a time
_TOGETHER = 64  # queries of several segments that are computed with a mask (≤ _BLOCK)


@dataclass(frozen=True)
class Segments:
    """S runs of a packed sequence's T tokens, in order, each of one row.

    A token sees its segment up to itself and all of the segment's prefix, which its row shares.
    """

    runs: tuple[Run, ...]
    starts: Tensor  # [S + 1] int32; where each segment begins, and T
    key_starts: Tensor  # [S + 1] int32; where they begin with their prefixes before them
    longest: int  # tokens of the longest segment
    longest_keys: int  # the same with its prefix

    @classmethod
    def of_runs(cls, runs: Sequence[Run], device: torch.device) -> Segments:
        """Make segments of runs that follow each other."""
        seen = [sum(run[1::2]) - sum(run[::2]) for run in runs]
        last = runs[-1][-1]
        return cls(
            tuple(runs),
            torch.tensor([*(run[-2] for run in runs), last], dtype=torch.int32, device=device),
            torch.tensor([0, *itertools.accumulate(seen)], dtype=torch.int32, device=device),
            max(run[-1] - run[-2] for run in runs),
            max(seen),
        )

    @functools.cached_property
    def keys(self) -> Tensor | None:
        """The tokens in the order of `key_starts`: [K] long; None: there are no prefixes."""
        parts = [ends for run in self.runs for ends in zip(run[::2], run[1::2], strict=True)]
        keys = np.concatenate([np.arange(*ends) for ends in parts])
        if len(keys) == self.runs[-1][-1]:
            return None
        return torch.from_numpy(keys).to(self.starts.device)

    def with_prefixes(self, *tensors: Tensor) -> Iterator[Tensor]:
        """Yield tensors [1, heads, T, d] as [1, heads, K, d]: each segment after its prefix."""
        return (t if self.keys is None else t.index_select(2, self.keys) for t in tensors)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention [1, T, heads, d] of queries [1, heads, T, d]; keys may have fewer heads."""
    query, key, value = _cast(query, key, value)
    if dropout:
        return _by_segment(query, key, value, segments, scale, dropout)
    if attention.takes_compiled(query, key, value, segments.runs):
        return attention.compiled_attention(query, key, value, segments.runs, scale)
    if attention.takes_rows(segments.runs, query.device):
        return attention.row_attention(query, key, value, segments.runs, scale)
    if not _has_kernel(query):
        return _by_block(query, key, value, segments, scale)
    from torch.nn.attention.varlen import varlen_attn

    seen = (query, *segments.with_prefixes(key, value))
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in seen)  # [tokens, heads, d]
    out: Any = varlen_attn(
        q, k, v, segments.starts, segments.key_starts, segments.longest, segments.longest_keys,
        scale=scale, window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out[None]


def _by_block(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
) -> Tensor:
    return _Attention.apply(query, key, value, segments.runs, scale)


class _Attention(torch.autograd.Function):
    """Attention of blocks of queries, after arXiv:2205.14135, B.2; scores are float32 at least."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float
    ) -> Tensor:
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        q, k, v = (at_least_float(t[0]) for t in (query, key, value))  # [heads, T, d]
        o = out[0].transpose(0, 1)
        with torch.autocast(query.device.type, enabled=False):
            for block in _blocks(runs, query.device):
                weights = _weights(block.queries(q, k), block.keys(k), scale, block)
                o[:, block.span] = torch.bmm(weights, block.keys(v)).view(len(q), -1, v.shape[2])
        ctx.save_for_backward(query, key, value, out)
        ctx.runs, ctx.scale = runs, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out = ctx.saved_tensors
        q, k, v = (at_least_float(t[0]) for t in (query, key, value))  # [heads, T, d]
        g, o = (at_least_float(t[0]).transpose(0, 1) for t in (grad, out))
        grad_query, grad_key, grad_value = (torch.zeros_like(t) for t in (q, k, v))
        sums = (g * o).sum(-1, keepdim=True)  # [heads, T, 1]
        with torch.autocast(query.device.type, enabled=False):
            for block in _blocks(ctx.runs, query.device):
                keys, values = block.keys(k), block.keys(v)
                queries, above = block.queries(q, k), block.queries(g, k)
                weights = _weights(queries, keys, ctx.scale, block)
                scores = torch.bmm(above, values.transpose(1, 2))
                scores.sub_(block.queries(sums, k)).mul_(weights).mul_(ctx.scale)
                grad_query[:, block.span] = torch.bmm(scores, keys).view(len(q), -1, q.shape[2])
                block.add(grad_key, torch.bmm(scores.transpose(1, 2), queries))
                block.add(grad_value, torch.bmm(weights.transpose(1, 2), above))
        grads = zip((grad_query, grad_key, grad_value), (query, key, value), strict=True)
        return *(gradient[None].to(t.dtype) for gradient, t in grads), None, None


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries that are computed together, and their keys: a prefix, and what follows it."""

    seen: tuple[slice, ...]  # the keys, in order; the last ones end with the queries
    span: slice  # the queries
    unseen: Tensor  # bool [n, n]; which of the last n keys, its own tokens, a query doesn't see

    def queries(self, tokens: Tensor, keys: Tensor) -> Tensor:
        """Select of [heads, T, d] the queries of each head of `keys`: [kv heads, g · n, d]."""
        return tokens[:, self.span].reshape(len(keys), -1, tokens.shape[2])

    def keys(self, tokens: Tensor) -> Tensor:
        """Select of [heads, T, d] the keys; a view where all are neighbours."""
        if len(self.seen) == 1:
            return tokens[:, self.seen[0]]
        return torch.cat([tokens[:, keys] for keys in self.seen], 1)

    def add(self, total: Tensor, gradients: Tensor) -> None:
        """Add gradients of the keys to `total` [heads, T, d]."""
        parts = gradients.split([keys.stop - keys.start for keys in self.seen], 1)
        for keys, part in zip(self.seen, parts, strict=True):
            total[:, keys] += part


@functools.lru_cache(maxsize=4)
def _blocks(runs: tuple[Run, ...], device: torch.device) -> list[_Block]:
    """Cut runs in blocks: neighbouring short ones of one prefix share one."""
    blocks = []
    for prefix, neighbours in itertools.groupby(runs, _prefix):
        for segments in _clusters(neighbours):
            sizes = [run[-1] - run[-2] for run in segments]
            start = segments[0][-2]
            end = start + sum(sizes)
            for first in range(start, end, _BLOCK):
                stop = min(end, first + _BLOCK)
                parts = sizes if len(sizes) > 1 else [stop - first]
                unseen = torch.block_diag(*(torch.ones(n, n).tril_() for n in parts)) == 0
                seen = _seen(prefix, start, stop)
                blocks.append(_Block(seen, slice(first, stop), unseen.to(device)))
    return blocks


def _prefix(run: Run) -> list[tuple[int, int]]:
    ends = zip(run[:-2:2], run[1:-2:2], strict=True)
    return [(start, stop) for start, stop in ends if start < stop]


def _seen(prefix: list[tuple[int, int]], start: int, stop: int) -> tuple[slice, ...]:
    """Return the parts of a prefix, and of what follows it, as neighbour of the last one or not."""
    if prefix and prefix[-1][1] == start:
        *prefix, (start, _) = prefix
    return tuple(slice(*part) for part in [*prefix, (start, stop)])


def _clusters(runs: Iterable[Run]) -> list[list[Run]]:
    """Group neighbours of at most `_TOGETHER` tokens in all; a longer one is alone."""
    clusters: list[list[Run]] = []
    for run in runs:
        if clusters and run[-1] - clusters[-1][0][-2] <= _TOGETHER:
            clusters[-1].append(run)
        else:
            clusters.append([run])
    return clusters


def _weights(queries: Tensor, keys: Tensor, scale: float, block: _Block) -> Tensor:
    """Compute probabilities [kv heads, g · n, m] of m keys."""
    n, m = len(block.unseen), keys.shape[1]
    scores = torch.baddbmm(
        queries.new_empty(()), queries, keys.transpose(1, 2), beta=0, alpha=scale
    )
    scores.view(len(keys), -1, n, m)[..., m - n :].masked_fill_(block.unseen, -torch.inf)
    return torch.softmax(scores, -1)


def _by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Run torch's attention on each segment, where probabilities are dropped."""
    sizes = segments.starts.diff().tolist()
    seen = segments.key_starts.diff().tolist()
    k, v = (t.split(seen, 2) for t in segments.with_prefixes(key, value))
    parts = []
    for q, keys, values in zip(query.split(sizes, 2), k, v, strict=True):
        n, m = q.shape[2], keys.shape[2]
        visible = torch.ones(n, m, dtype=torch.bool, device=q.device).tril_(m - n)
        parts.append(
            F.scaled_dot_product_attention(
                q, keys, values, visible,
                dropout_p=dropout, scale=scale, enable_gqa=q.shape[1] != keys.shape[1],
            )
        )  # fmt: skip
    return torch.cat(parts, 2).transpose(1, 2).contiguous()


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to autocast's dtype, as torch's own attention does; rotated q and k come wider."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def _has_kernel(query: Tensor) -> bool:
    """Tell whether torch's variable-length attention computes this."""
    return (
        query.is_cuda
        and torch.version.hip is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )
