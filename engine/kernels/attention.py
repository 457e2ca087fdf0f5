"""Causal attention over packed rows on a CPU: compiled, and as matrix products over padded batches.

Compiled (`cpu/attention.h`) in bfloat16 on CPUs that multiply it (AVX512-BF16): each thread takes
the rows that share a prompt or more, one key head at a time, and keeps their keys in its cache.
Otherwise short rows of similar length are computed together in a few operations a layer. Few rows
that share a prompt, such as a preference pair, are computed as one, with a mask that keeps them
apart; of many with a short one, each has a copy of it.
"""

import ctypes
import functools
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.algorithms.masked import at_least_float
from engine.kernels.training_ops import library

Run = tuple[int, ...]
"""First and last + 1 of each part of a segment's prefix (one, which may be empty, or those of a
tree), and of the segment: (0, 9, 9, 20)."""

_LONGEST = 256  # tokens of a row, or of rows with their prompt
_MASKED = 2.5  # most scores computed for each that is needed, where rows share one prompt
_COPIED = 1.25  # the same where each row has a copy of its prompt
_SCORES = 1 << 18  # most scores of a batch, for one head
_LONGER = 1.2  # how many times longer than a batch's shortest row its longest may be,
_NEAR = 8  # or by how many tokens


@dataclass(frozen=True, slots=True)
class _Batch:
    """B rows of up to L tokens, padded on the right."""

    rows: int
    index: Tensor  # [B · L] long; the token at each position; padding has any
    is_token: Tensor  # [B · L, 1, 1]; 1 at a token, 0 at padding and at a prompt's copy
    mask: Tensor  # [1 or B, 1, 1, L, L]; 0 where a query sees a key, else -inf


@dataclass(frozen=True, slots=True)
class _Plan:
    batches: list[_Batch]
    positions: Tensor  # [T] long; of each token among those of all batches
    copies: Tensor  # [C] long; the positions of copies of prompts
    copied: Tensor  # [C] long; their tokens


@dataclass(frozen=True, slots=True)
class _Row:
    """Tokens that are attended to together: a row, a prompt and its rows, or a copy and a row."""

    start: int
    stop: int
    cuts: tuple[int, ...] = ()  # where each row behind the prompt begins; () for a row alone
    prompt: tuple[int, int] = (0, 0)  # first and last + 1 of what is copied before it

    @property
    def copied(self) -> int:
        return self.prompt[1] - self.prompt[0]

    @property
    def length(self) -> int:
        return self.copied + self.stop - self.start

    @property
    def needed(self) -> int:
        """Scores of pairs of tokens of which one may see the other, all of a row's counted."""
        if not self.cuts:
            return self.length * (self.stop - self.start)
        prompt = self.cuts[0] - self.start
        ends = itertools.pairwise((*self.cuts, self.stop))
        return prompt**2 + sum((b - a) * (b - a + prompt) for a, b in ends)


def _group_rows(runs: Sequence[Run]) -> list[_Row]:
    rows = []
    for _, group in itertools.groupby(runs, lambda run: run[0] if run[0] < run[1] else run[2]):
        first, *rest = group
        stop = rest[-1][3] if rest else first[3]
        prompt_and_rows = _Row(first[2], stop, tuple(run[2] for run in rest))
        if (
            prompt_and_rows.length <= _LONGEST
            and prompt_and_rows.length**2 <= _MASKED * prompt_and_rows.needed
        ):
            rows.append(prompt_and_rows)
            continue
        rows.append(_Row(first[2], rest[0][3]) if rest else prompt_and_rows)
        rows += [_Row(run[2], run[3], prompt=(first[2], first[3])) for run in rest[1:]]
    return rows


def _attention_mask(rows: Sequence[_Row], longest: int) -> Tensor:
    """Return the mask of a batch; padding sees what is there, and nothing sees it."""
    behind = torch.ones(longest, longest, dtype=torch.bool).triu_(1)
    if any(row.cuts for row in rows):
        row_numbers = np.zeros((len(rows), longest), dtype=np.int64)  # 0: prompt; 1, 2, …: rows
        for numbers, row in zip(row_numbers, rows, strict=True):
            for cut in row.cuts:
                numbers[cut - row.start :] += 1
        number = torch.from_numpy(row_numbers)
        query, key = number[:, :, None], number[:, None, :]
        behind = behind | ((key > 0) & (key != query))
    mask = torch.zeros(behind.shape).masked_fill_(behind, -torch.inf)
    return mask.view(-1, 1, 1, longest, longest)


@functools.lru_cache(maxsize=4)
def _plan(runs: tuple[Run, ...], device: torch.device) -> _Plan:
    positions = np.empty(max(run[3] for run in runs), dtype=np.int64)
    batches, first = [], 0
    copies, copied = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for rows in _similar(_group_rows(runs)):
        longest = max(row.length for row in rows)
        index = np.zeros((len(rows), longest), dtype=np.int64)
        is_token = np.zeros(index.shape, dtype=np.float32)
        for at, row in enumerate(rows):
            tokens, begin = np.arange(row.start, row.stop), first + at * longest
            index[at, : row.copied] = np.arange(*row.prompt)
            index[at, row.copied : row.length] = tokens
            is_token[at, row.copied : row.length] = 1.0
            positions[tokens] = begin + row.copied + np.arange(len(tokens))
            copies.append(begin + np.arange(row.copied))
            copied.append(np.arange(*row.prompt))
        batches.append(
            _Batch(
                len(rows),
                torch.from_numpy(index.ravel()).to(device),
                torch.from_numpy(is_token.reshape(-1, 1, 1)).to(device),
                _attention_mask(rows, longest).to(device),
            )
        )
        first += index.size
    index_arrays = (positions, np.concatenate(copies), np.concatenate(copied))
    return _Plan(batches, *(torch.from_numpy(array).to(device) for array in index_arrays))


def _similar(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Yield the rows in batches of similar length."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: row.length):
        length = row.length
        shortest = batch[0].length if batch else length
        too_many = (len(batch) + 1) * length**2 > _SCORES
        if batch and (too_many or length > max(_LONGER * shortest, shortest + _NEAR)):
            yield sorted(batch, key=lambda row: row.start)
            batch = []
        batch.append(row)
    if batch:
        yield sorted(batch, key=lambda row: row.start)


@functools.lru_cache(maxsize=4)
def takes_rows(runs: tuple[Run, ...], device: torch.device) -> bool:
    """Whether `row_attention` computes these rows in less time than a pass over them would."""
    if device.type != "cpu" or is_tree(runs):
        return False
    rows = _group_rows(runs)
    if any(row.length > _LONGEST for row in rows):
        return False
    return _at_most(_MASKED, rows) and _at_most(_COPIED, [row for row in rows if row.copied])


def _at_most(times: float, rows: Sequence[_Row]) -> bool:
    """Whether `rows` compute at most `times` times the scores that they need."""
    return sum(row.length**2 for row in rows) <= times * sum(row.needed for row in rows)


def is_tree(runs: Sequence[Run]) -> bool:
    """Whether a segment has more before it than the first one of its group."""
    prompt: Run = (0, 0)
    for run in runs:
        if run[0] == run[1]:
            prompt = run[-2:]
        elif run[:-2] != prompt:
            return True
    return False


def row_attention(
    query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float
) -> Tensor:
    """Return attention [1, T, heads, d] of queries [1, heads, T, d]; GQA has fewer key heads."""
    return _Attention.apply(query, key, value, runs, scale)


class _Attention(torch.autograd.Function):
    """Keeps no padded tensors and no scores, which backward computes again, in float32 at least."""

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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_output: Tensor = gradients[0]
        query, key, value, attended = ctx.saved_tensors
        plan, heads, kv_heads = _plan(ctx.runs, grad_output.device), query.shape[1], key.shape[1]
        parts: list[list[Tensor]] = [[], [], []]
        with torch.autocast(grad_output.device.type, enabled=False):
            wide_grad = at_least_float(grad_output)
            sums = (at_least_float(attended) * wide_grad).sum(-1, keepdim=True)
            for batch in plan.batches:
                q, k, v = (_rows(batch, t, kv_heads) for t in (query, key, value))
                g = _rows(batch, wide_grad.transpose(1, 2), kv_heads, zero_padding=True)
                grad_dot = _rows(batch, sums.transpose(1, 2), kv_heads, zero_padding=True)
                weights = _weights(batch, q, k, ctx.scale)
                scores = torch.bmm(g, v.transpose(1, 2))
                scores.sub_(grad_dot).mul_(weights).mul_(ctx.scale)
                parts[0].append(_flat(batch, torch.bmm(scores, k), heads))
                parts[1].append(_flat(batch, torch.bmm(scores.transpose(1, 2), q), kv_heads))
                parts[2].append(_flat(batch, torch.bmm(weights.transpose(1, 2), g), kv_heads))
            totals = [_tokens(plan, parts[0]), *(_key_gradients(plan, part) for part in parts[1:])]
        pairs = zip(totals, (query, key, value), strict=True)
        return *(t.transpose(0, 1)[None].to(like.dtype) for t, like in pairs), None, None


def _weights(batch: _Batch, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return the probabilities [B · kv heads, g · L, L]."""
    scores = torch.baddbmm(
        queries.new_empty(()), queries, keys.transpose(1, 2), beta=0, alpha=scale
    )
    longest = keys.shape[1]
    scores.view(batch.rows, len(keys) // batch.rows, -1, longest, longest).add_(batch.mask)
    return torch.softmax(scores, -1)


def _rows(batch: _Batch, tokens: Tensor, kv_heads: int, *, zero_padding: bool = False) -> Tensor:
    """Take a batch's rows [B · kv heads, g · L, d] of [1, g · kv heads, T, d], float32 at least."""
    values = at_least_float(tokens[0].transpose(0, 1).index_select(0, batch.index))
    if zero_padding:
        values.mul_(batch.is_token)
    rows = values.view(batch.rows, -1, kv_heads, tokens.shape[1] // kv_heads, tokens.shape[3])
    return rows.permute(0, 2, 3, 1, 4).reshape(batch.rows * kv_heads, -1, tokens.shape[3])


def _flat(batch: _Batch, rows: Tensor, heads: int) -> Tensor:
    """Reorder rows [B · kv heads, g · L, d] to [B · L, heads, d]."""
    by_head = rows.view(batch.rows, heads, -1, rows.shape[2])
    return by_head.transpose(1, 2).reshape(-1, heads, rows.shape[2])


def _tokens(plan: _Plan, parts: Sequence[Tensor]) -> Tensor:
    """Take the tokens [T, heads, d] from the positions of all batches."""
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).index_select(0, plan.positions)


def _key_gradients(plan: _Plan, parts: Sequence[Tensor]) -> Tensor:
    """Sum the gradients [T, heads, d] of keys or values over the copies of a prompt."""
    total = _tokens(plan, parts)
    if len(plan.copies):
        flat = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        total.index_add_(0, plan.copied, flat.index_select(0, plan.copies))
    return total


_COMPILED_LONGEST = 1024  # keys of a token


class _Heads(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("token", c_int64), ("head", c_int64)]


_COUNTS = ("count", "longest", "heads", "kv_heads", "d", "threads")
_TENSORS = ("q", "k", "v", "out", "grad_q", "grad_k", "grad_v")


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
class _CompiledPlan:
    """Runs as the C function takes them."""

    runs: Tensor  # int64 [S, 3]; tokens before each, its first and last + 1
    trees: Tensor  # int64 [G + 1]; where those begin that have none before, and S
    longest: int  # keys of a run at most


_recent: deque[tuple[tuple[Run, ...], _CompiledPlan | None]] = deque(maxlen=4)


def _compiled_plan(runs: tuple[Run, ...]) -> _CompiledPlan | None:
    """Plan runs in tree order: each continues part of the path to the one before it; else None."""
    # All layers ask for the same ones, so that to compare them would take longer than to attend.
    for recent_runs, plan in tuple(_recent):
        if recent_runs is runs:
            return plan
    plan = _build_compiled_plan(runs)
    _recent.append((runs, plan))
    return plan


def _build_compiled_plan(runs: tuple[Run, ...]) -> _CompiledPlan | None:
    path: list[tuple[int, Run]] = []  # how many tokens there are up to the end of each run, which
    table: list[tuple[int, int, int]] = []
    for run in runs:
        *_, start, end = run
        prefix_length = sum(run[1:-2:2]) - sum(run[:-2:2])
        while path and path[-1][0] > prefix_length:
            path.pop()
        prefix = path[-1][1] if path else ()
        if prefix_length and run[:-2] != prefix:
            return None
        joined = prefix and prefix[-1] == start
        parts = (*prefix[:-1], end) if joined else (*prefix, start, end)
        path.append((prefix_length + end - start, parts))
        table.append((prefix_length, start, end))
    trees = [at for at, (prefix_length, *_) in enumerate(table) if not prefix_length]
    longest = max(prefix_length + end - start for prefix_length, start, end in table)
    return _CompiledPlan(torch.tensor(table), torch.tensor([*trees, len(table)]), longest)


def takes_compiled(query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...]) -> bool:
    """Whether `compiled_attention` computes this, and with all threads: see `packed_attention`."""
    inputs = (query, key, value)
    if not all(t.dtype == torch.bfloat16 and t.device.type == "cpu" for t in inputs):
        return False
    return all(map(_in_words, inputs)) and library() is not None and takes_runs(runs, key.shape[1])


def takes_runs(runs: tuple[Run, ...], kv_heads: int) -> bool:
    """Whether rows are short enough, and enough for all threads."""
    if (plan := _compiled_plan(runs)) is None or plan.longest > _COMPILED_LONGEST:
        return False
    return (len(plan.trees) - 1) * kv_heads >= torch.get_num_threads()


def compiled_attention(
    query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float
) -> Tensor:
    """Return attention [1, T, heads, d] of queries [1, heads, T, d]; GQA has fewer key heads."""
    return _CompiledAttention.apply(query, key, value, runs, scale)


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `compiled_attention` without a gradient, and what `attention_gradients` needs."""
    out = _like(query)
    softmax = torch.empty(*out.shape[1:3], 2)
    _attend(runs, scale, softmax, [query, key, value, out.transpose(1, 2)])
    return out, softmax


def attention_gradients(
    inputs: Sequence[Tensor],
    softmax: Tensor,
    grad_output: Tensor,
    runs: tuple[Run, ...],
    scale: float,
) -> list[Tensor]:
    """Return the gradients [1, T, heads, d] of query, key and value, which are the `inputs`."""
    gradients = [_like(tensor) for tensor in inputs]
    by_head = [tensor.transpose(1, 2) for tensor in (grad_output, *gradients)]
    _attend(runs, scale, softmax, [*inputs, *by_head])
    return gradients


class _CompiledAttention(torch.autograd.Function):
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
        [grad_output], (*inputs, softmax) = gradients, ctx.saved_tensors
        grad_output = grad_output if _in_words(grad_output) else grad_output.contiguous()
        input_gradients = attention_gradients(inputs, softmax, grad_output, ctx.runs, ctx.scale)
        return *(tensor.transpose(1, 2) for tensor in input_gradients), None, None


def _in_words(tensor: Tensor) -> bool:
    """Whether neighbours in the last dimension can be read in twos."""
    return tensor.stride(3) == 1 and not any(size % 2 for size in tensor.stride()[1:3])


def _like(tensor: Tensor) -> Tensor:
    """Allocate [1, T, heads, d] for a tensor [1, heads, T, d]."""
    return tensor.new_empty(1, tensor.shape[2], tensor.shape[1], tensor.shape[3])


def _attend(
    runs: tuple[Run, ...], scale: float, softmax: Tensor, tensors: Sequence[Tensor]
) -> None:
    """Run the forward pass on four tensors [1, heads, T, d], the backward pass on seven."""
    functions, plan = library(), _compiled_plan(runs)
    assert functions is not None  # `takes_compiled` was asked
    assert plan is not None
    (_, heads, _, d), kv_heads = tensors[0].shape, tensors[1].shape[1]
    call = _Call(
        plan.runs.data_ptr(), plan.trees.data_ptr(), len(plan.trees) - 1, plan.longest,
        heads, kv_heads, d, torch.get_num_threads(), scale,
        *(_Heads(t.data_ptr(), t.stride(2), t.stride(1)) for t in tensors),
        softmax=softmax.data_ptr(),
    )  # fmt: skip
    if not functions.packed_attention(ctypes.byref(call), len(tensors) > 4):
        raise MemoryError("no memory for attention: give micro-batches fewer tokens")
