"""Triton kernels for CUDA and ROCm: of the vocabulary head, of a decode step, and of sampling.

`statistics` and `gradients` serve `chunked_head`: what torch computes in ten passes over logits
[n, V], most of them in float32, is one pass over them as the matrix product left them. `add_norm`,
`rotate_and_store` and `silu_product` are what a decode step of the native engine has beside matrix
products and attention, rounded where its torch operations round; `block_masses` is what sampling
reads of logits. Triton comes with torch's CUDA and ROCm builds; TRITON_INTERPRET=1 runs the
kernels on a CPU.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's way to run them on a CPU
_COMPILED = torch.version.cuda is not None or torch.version.hip is not None
if _INTERPRETED or _COMPILED:
    import triton
    import triton.language as tl

_BLOCK = 4096  # logits of a row that a program has at a time
_FLAT = 1024  # numbers of a program that are no rows
MASS_BLOCK = 256  # tokens whose probabilities `block_masses` sums
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes(tensor: Tensor) -> bool:
    """Whether the kernels compute on the device of `tensor`, and in its dtype."""
    return (_INTERPRETED or (_COMPILED and tensor.is_cuda)) and tensor.dtype in _DTYPES


def statistics(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return statistics of softmax(logits / temperature) [n, V], float32 [n] each.

    Log-probs of `targets` [n] int64, logs of the sums of exponentials, entropies in nats, and Σ p².
    """
    logits = logits.contiguous()
    rows, size = logits.shape
    outputs = [torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(4)]
    if rows:
        _statistics[(rows,)](
            logits, targets.contiguous(), *outputs, size, temperature, BLOCK=_BLOCK
        )
    log_probs, sums, entropies, squares = outputs
    return log_probs, sums, entropies, squares


def gradients(
    logits: Tensor,
    targets: Tensor,
    sums: Tensor,
    grad_log_probs: Tensor,
    temperature: float,
    entropy: tuple[Tensor, Tensor] | None,
    out: Tensor,
) -> Tensor:
    """Write the gradients [n, V] of the logits to `out`, which may be `logits`, in their dtype.

    `sums` [n] are those of `statistics`, `grad_log_probs` [n] the gradients of log-probs, `entropy`
    the entropies [n] and their gradients [n], where they have any.
    """
    rows, size = logits.shape
    entropies, grad_entropies = entropy or (sums, grad_log_probs)
    if rows:
        _gradients[(rows, triton.cdiv(size, _BLOCK))](
            logits, targets.contiguous(), sums, grad_log_probs, entropies, grad_entropies, out,
            size, temperature, ENTROPY=entropy is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def add_norm(x: Tensor, plus: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + plus, and its RMSNorm: two tensors like x [..., H]."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    total = rows if plus is None else torch.empty_like(rows)
    out = torch.empty_like(rows)
    added = rows if plus is None else plus.reshape(-1, size)
    if len(rows):
        _add_norm[(len(rows),)](
            rows, added, weight, total, out, size, eps,
            ADD=plus is not None, BLOCK=triton.next_power_of_2(size),
        )  # fmt: skip
    return total.view(x.shape), out.view(x.shape)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    cache: tuple[Tensor, Tensor],
    columns: Tensor,
) -> Tensor:
    """Rotate q [L, heads, d] and k [L, kv_heads, d], store k and v in the cache, and return q.

    q is rotated in place where it is contiguous. k and v of row i go to column `columns[i]` of slot
    i of a `cache` of keys and values [slots, kv_heads, T, d]. `rotary` [columns, d] are cosines,
    and sines whose first half has its sign turned; `positions` and `columns` are int64 [L].
    """
    rows, heads, size = q.shape
    (cos, sin), (keys, values), q = rotary, cache, q.contiguous()
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1
    _rotate_and_store[(rows, heads + k.shape[1])](
        q, k.contiguous(), v.contiguous(), cos, sin, positions, keys, values, columns,
        *keys.stride()[:3], heads, k.shape[1],
        HALF=size // 2, BLOCK=triton.next_power_of_2(size // 2),
    )  # fmt: skip
    return q


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Write silu(gate) · up over `gate`; both are contiguous."""
    _silu_product[(triton.cdiv(gate.numel(), _FLAT),)](gate, up, gate.numel(), BLOCK=_FLAT)
    return gate


def block_masses(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sum softmax(logits / temperature) [R, V] over blocks of `MASS_BLOCK` tokens.

    Returns the sums [R, ⌈V / MASS_BLOCK⌉], the largest logit / temperature [R, 1], and the sum of
    exp(logit / temperature − largest) [R, 1]; all float32.
    """
    logits = logits.contiguous()
    rows, size = logits.shape
    parts, blocks = triton.cdiv(size, _BLOCK), triton.cdiv(size, MASS_BLOCK)
    maxima = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, parts, _BLOCK // MASS_BLOCK, dtype=torch.float32, device=maxima.device)
    _block_masses[(rows, parts)](
        logits, maxima, sums, size, temperature, parts,
        BLOCKS=_BLOCK // MASS_BLOCK, WIDTH=MASS_BLOCK,
    )  # fmt: skip
    largest = maxima.amax(1, keepdim=True)
    sums *= (maxima - largest).exp()[..., None]
    total = sums.sum((1, 2))[:, None]
    return sums.flatten(1)[:, :blocks] / total, largest, total


if _INTERPRETED or _COMPILED:

    @triton.jit
    def _statistics(
        logits, targets, log_probs, sums, entropies, squares,
        size, temperature, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        maximum, total, weighted, squared = -float("inf"), 0.0, 0.0, 0.0
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < size
            z = tl.load(logits + row * size + at, mask=inside, other=-float("inf"))
            z = z.to(tl.float32) / temperature
            new_maximum = tl.maximum(maximum, tl.max(z, 0))
            shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
            # A NaN stays one: the comparison is false for it.
            p = tl.where(z == -float("inf"), 0.0, tl.exp(z - shift))
            scale = tl.where(maximum == -float("inf"), 0.0, tl.exp(maximum - shift))
            total = total * scale + tl.sum(p, 0)
            weighted = weighted * scale + tl.sum(tl.where(p == 0.0, 0.0, p * z), 0)
            squared = squared * scale * scale + tl.sum(p * p, 0)
            maximum = new_maximum
        log_sum = maximum + tl.log(total)
        target = tl.load(logits + row * size + tl.load(targets + row)).to(tl.float32)
        tl.store(log_probs + row, target / temperature - log_sum)
        tl.store(sums + row, log_sum)
        tl.store(entropies + row, log_sum - weighted / total)
        tl.store(squares + row, squared / (total * total))

    @triton.jit
    def _gradients(
        logits, targets, sums, grad_log_probs, entropies, grad_entropies, out,
        size, temperature, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        z = tl.load(logits + row * size + at, mask=inside, other=-float("inf"))
        log_p = z.to(tl.float32) / temperature - tl.load(sums + row)
        p = tl.exp(log_p)
        grad_log_prob = tl.load(grad_log_probs + row)
        grad_logits = tl.where(at == tl.load(targets + row), grad_log_prob, 0.0) - grad_log_prob * p
        if ENTROPY:
            entropy_term = tl.where(p == 0.0, 0.0, p * (log_p + tl.load(entropies + row)))
            grad_logits -= tl.load(grad_entropies + row) * entropy_term
        grad_logits = grad_logits / temperature
        tl.store(out + row * size + at, grad_logits.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _add_norm(
        x, plus, weight, total, out, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        inside = at < size
        value = tl.load(x + row * size + at, mask=inside, other=0.0)
        if ADD:
            addend = tl.load(plus + row * size + at, mask=inside, other=0.0)
            value = (value.to(tl.float32) + addend.to(tl.float32)).to(value.dtype)
            tl.store(total + row * size + at, value, mask=inside)
        wide = value.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / size + eps)
        normed = (wide * scale).to(value.dtype).to(tl.float32)
        factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * size + at, (normed * factor).to(value.dtype), mask=inside)

    @triton.jit
    def _rotate_and_store(
        q, k, v, cos, sin, positions, keys, values, columns,
        slot_stride, head_stride, column_stride, heads, kv_heads,
        HALF: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        at = tl.arange(0, BLOCK)
        inside = at < HALF
        position = tl.load(positions + row) * 2 * HALF
        cos_1 = tl.load(cos + position + at, mask=inside, other=0.0).to(tl.float32)
        cos_2 = tl.load(cos + position + HALF + at, mask=inside, other=0.0).to(tl.float32)
        sin_1 = tl.load(sin + position + at, mask=inside, other=0.0).to(tl.float32)
        sin_2 = tl.load(sin + position + HALF + at, mask=inside, other=0.0).to(tl.float32)
        is_query, kv_head = head < heads, head - heads
        query = q + (row * heads + head) * 2 * HALF
        key = k + (row * kv_heads + kv_head) * 2 * HALF
        value = v + (row * kv_heads + kv_head) * 2 * HALF
        offset = row * slot_stride + kv_head * head_stride + tl.load(columns + row) * column_stride
        as_query, as_key = at < tl.where(is_query, HALF, 0), at < tl.where(is_query, 0, HALF)
        first = tl.load(query + at, mask=as_query, other=0.0)
        second = tl.load(query + HALF + at, mask=as_query, other=0.0)
        dtype = first.dtype
        first = tl.where(is_query, first, tl.load(key + at, mask=as_key, other=0.0))
        second = tl.where(is_query, second, tl.load(key + HALF + at, mask=as_key, other=0.0))
        first, second = first.to(tl.float32), second.to(tl.float32)
        rotated_1 = ((first * cos_1).to(dtype).to(tl.float32) + second * sin_1).to(dtype)
        rotated_2 = ((second * cos_2).to(dtype).to(tl.float32) + first * sin_2).to(dtype)
        tl.store(query + at, rotated_1, mask=as_query)
        tl.store(query + HALF + at, rotated_2, mask=as_query)
        tl.store(keys + offset + at, rotated_1, mask=as_key)
        tl.store(keys + offset + HALF + at, rotated_2, mask=as_key)
        tl.store(values + offset + at, tl.load(value + at, mask=as_key), mask=as_key)
        tl.store(values + offset + HALF + at, tl.load(value + HALF + at, mask=as_key), mask=as_key)

    @triton.jit
    def _silu_product(gate, up, count, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        value = tl.load(gate + at, mask=inside, other=0.0)
        wide = value.to(tl.float32)
        silu = (wide / (1.0 + tl.exp(-wide))).to(value.dtype).to(tl.float32)
        factor = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(gate + at, (silu * factor).to(value.dtype), mask=inside)

    @triton.jit
    def _block_masses(
        logits, maxima, sums, size, temperature, parts, BLOCKS: tl.constexpr, WIDTH: tl.constexpr
    ):  # fmt: skip
        row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        at = tl.arange(0, BLOCKS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        at += part * BLOCKS * WIDTH
        z = tl.load(logits + row * size + at, mask=at < size, other=-float("inf"))
        z = z.to(tl.float32) / temperature
        largest = tl.max(tl.max(z, 1), 0)
        shift = tl.where(largest == -float("inf"), 0.0, largest)
        mass = tl.sum(tl.exp(z - shift), 1)
        index = row * parts + part
        tl.store(maxima + index, largest)
        tl.store(sums + index * BLOCKS + tl.arange(0, BLOCKS), mass)
