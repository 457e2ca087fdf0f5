"""What the machine can do: rates of matrix products and of reading memory, for `roofline.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from vs_trl_cases import Size

from engine.kernels.training_ops import input_gradient, linear, weight_gradient


@dataclass(frozen=True, slots=True)
class Peak:
    """Of the machine, in one dtype."""

    flops: float  # a second, of a large matrix product
    bytes: float  # a second, read from memory


def measure_peak(dtype: torch.dtype) -> Peak:
    """GEMM of 2048³; reading 512 MB."""
    size = 2048
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    gemm = best(lambda: a @ b, 5)
    data = torch.ones(2**28, dtype=torch.int16)
    matrix = data.view(torch.int64)
    read = best(lambda: matrix.sum(), 5)
    return Peak(2 * size**3 / gemm, data.nbytes / read)


def product_rates(shape: Size, dtype: torch.dtype, tokens: int = 1280) -> Iterator[str]:
    """Gflop/s of a layer's products alone: forward, of the input's gradient, of the weight's."""
    kv, hidden, inner = _sizes(shape)
    for inputs, outputs in [(hidden, hidden), (hidden, kv), (hidden, inner), (inner, hidden)]:
        flops = 2 * tokens * inputs * outputs
        rates = [f"{flops / s / 1e9:.0f}" for s in _seconds(tokens, inputs, outputs, dtype)]
        yield f"{tokens} tokens, {inputs} → {outputs}: {', '.join(rates)}"


def product_seconds(shape: Size, dtype: torch.dtype, tokens: int, read: int) -> float:
    """Of a training pass's products alone, forward and backward, each at its own shape's rate.

    `read` of the `tokens` predict one: the head and what follows the last layer's attention take
    those. Attention itself is no product of a library, and not among them.
    """
    kv, hidden, inner = _sizes(shape)
    early = [(hidden, hidden, 1), (hidden, kv, 2)]
    late = [(hidden, hidden, 1), (hidden, inner, 2), (inner, hidden, 1)]
    counted = [(tokens, i, o, shape.layers * count) for i, o, count in early]
    counted += [(tokens, i, o, (shape.layers - 1) * count) for i, o, count in late]
    counted += [(read, i, o, count) for i, o, count in late]
    counted.append((read, hidden, shape.vocabulary, 1))
    return sum(count * sum(_seconds(n, i, o, dtype)) for n, i, o, count in counted)


def _sizes(shape: Size) -> tuple[int, int, int]:
    """Widths of keys, of the layers, and within the MLP."""
    return shape.hidden // shape.heads * shape.kv_heads, shape.hidden, shape.intermediate


def _seconds(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> list[float]:
    """Of a linear layer's forward product, of its input's gradient, of its weight's."""
    x, above = (torch.randn(tokens, size).to(dtype) for size in (inputs, outputs))
    weight = torch.randn(outputs, inputs).to(dtype)
    calls = (linear, x, weight), (input_gradient, above, weight), (weight_gradient, above, x)
    return [best(partial(call, *tensors), 10) for call, *tensors in calls]


def best(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, after one untimed."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)
