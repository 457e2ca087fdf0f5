"""What the machine can do: rates of matrix products and of reading memory, for `roofline.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from vs_trl_cases import Size

from engine.models.products import input_gradient, linear, weight_gradient


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
    kv, hidden, inner = (
        shape.hidden // shape.heads * shape.kv_heads,
        shape.hidden,
        shape.intermediate,
    )
    for inputs, outputs in [(hidden, hidden), (hidden, kv), (hidden, inner), (inner, hidden)]:
        x, above = (torch.randn(tokens, size).to(dtype) for size in (inputs, outputs))
        weight, rates = torch.randn(outputs, inputs).to(dtype), []
        calls = (linear, x, weight), (input_gradient, above, weight), (weight_gradient, above, x)
        for call, *tensors in calls:
            seconds = best(partial(call, *tensors), 10)
            rates.append(f"{2 * tokens * inputs * outputs / seconds / 1e9:.0f}")
        yield f"{tokens} tokens, {inputs} → {outputs}: {', '.join(rates)}"


def best(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, after one untimed."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)
