"""What lies between the matrix products of a layer in training, as compiled loops: `cpu/train.c`.

In bfloat16 on CPUs that multiply it (AVX512-BF16). A training pass of a small model is limited by
operations that are short, or that go over memory once more; each of these goes over it once. Sums
are float32, and results are rounded where transformers' modules round them, or less often. Nothing
here has a gradient: `fused_functions` calls these. Attention is in `compiled_attention`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine.compiled import compiled

_NUMBERS_OF_TWO = 1 << 14  # from which more than one thread is worth waking


@cache
def library() -> ctypes.CDLL | None:
    """`cpu/train.c`, compiled; None where that can't be done or used."""
    found = compiled(Path(__file__).parent / "cpu" / "train.c")
    if found is None:
        return None
    p, n = c_void_p, c_int64
    found.norm_forward.argtypes = [p, p, p, n, n, c_double, n, p, p, p]
    found.norm_backward.argtypes = [p, p, p, p, p, n, n, n, p, p]
    found.scatter_rows.argtypes = [p, p, n, n, n, n, p]
    found.column_sums.argtypes = [p, n, n, n, p]
    found.adamw.argtypes = [p, p, n, n]
    found.rotate.argtypes = [p, p, p, n, n, n, n, n, n, p]
    found.silu_product.argtypes = [p, p, n, n, p]
    found.silu_product_backward.argtypes = [p, p, p, n, n, p, p, p]
    found.head_statistics.argtypes = [p, p, n, n, c_double, n, p, p, p, p]
    found.head_gradients.argtypes = [p, p, p, p, p, p, n, n, c_double, n, p]
    found.packed_attention.argtypes, found.packed_attention.restype = [p, n], n
    for name in ("mlp_forward", "mlp_backward", "linears_forward", "linears_backward"):
        function = getattr(found, name)
        function.argtypes, function.restype = [p], n
    return found


def takes(*tensors: Tensor) -> bool:
    """Whether the loops compute with these: bfloat16, contiguous, on the CPU, and not empty."""
    return all(
        t.dtype == torch.bfloat16 and t.device.type == "cpu" and t.is_contiguous() and t.numel() > 0
        for t in tensors
    ) and (library() is not None)


def norm(x: Tensor, weight: Tensor, eps: float, plus: Tensor | None = None) -> tuple[Tensor, ...]:
    """x [..., H] + plus, its RMSNorm, and float32 1 / √(mean(x²) + eps) a row."""
    total = x if plus is None else torch.empty_like(x)
    out = torch.empty_like(x)
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    scale = torch.empty(rows, dtype=torch.float32)
    _library().norm_forward(
        x.data_ptr(), _address(plus), weight.data_ptr(), rows, width, eps,
        torch.get_num_threads(), total.data_ptr(), out.data_ptr(), scale.data_ptr(),
    )  # fmt: skip
    return total, out, scale


def norm_gradients(
    x: Tensor, weight: Tensor, scale: Tensor, above: Tensor, plus: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of x, added to `plus`, and of the weight in float32."""
    grad, width, threads = torch.empty_like(x), x.shape[-1], torch.get_num_threads()
    shares = torch.empty(threads, width, dtype=torch.float32)
    _library().norm_backward(
        x.data_ptr(), weight.data_ptr(), scale.data_ptr(), above.data_ptr(), _address(plus),
        len(scale), width, threads, grad.data_ptr(), shares.data_ptr(),
    )  # fmt: skip
    return grad, shares.sum(0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Rotary positions of x [B, L, heads, d] by cos and sin [B or 1, L, 1, d]."""
    out, (heads, d) = torch.empty_like(x), x.shape[2:]
    rows, period = x.shape[0] * x.shape[1], cos.numel() // d
    _library().rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, heads, d, period, back,
        torch.get_num_threads(), out.data_ptr(),
    )  # fmt: skip
    return out


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    out = torch.empty_like(gate)
    _library().silu_product(
        gate.data_ptr(), up.data_ptr(), gate.numel(), torch.get_num_threads(), out.data_ptr()
    )
    return out


def silu_product_gradients(
    gate: Tensor, up: Tensor, above: Tensor, *, product: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of gate and up, the latter written over `above`; and, on request, silu(gate) · up."""
    of_gate = torch.empty_like(gate)
    out = torch.empty_like(gate) if product else None
    _library().silu_product_backward(
        gate.data_ptr(), up.data_ptr(), above.data_ptr(), gate.numel(),
        torch.get_num_threads(), of_gate.data_ptr(), above.data_ptr(), _address(out),
    )  # fmt: skip
    return of_gate, above, out


def scatter_rows(x: Tensor, index: Tensor, tokens: int) -> Tensor:
    """[T, W] with rows of x [N, W] at `index` [N] long, all different, and zeros elsewhere."""
    out = x.new_empty(tokens, x.shape[1])
    _library().scatter_rows(
        x.data_ptr(), index.data_ptr(), *x.shape, tokens, torch.get_num_threads(), out.data_ptr()
    )
    return out


def column_sums(x: Tensor) -> Tensor:
    """Sums [W] over the rows of x [R, W], in float32."""
    threads = torch.get_num_threads()
    shares = torch.empty(threads, x.shape[1], dtype=torch.float32)
    _library().column_sums(x.data_ptr(), *x.shape, threads, shares.data_ptr())
    return shares.sum(0)


def head_statistics(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy: bool, squares: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Of softmax(logits [N, V] / temperature), float32 [N]: log-probs of `targets` [N], log of the
    sum of exponentials; on request the entropy and Σ p²."""
    rows, size = logits.shape
    log_probs, sums = (torch.empty(rows, dtype=torch.float32) for _ in range(2))
    entropies, found = (torch.empty_like(sums) if asked else None for asked in (entropy, squares))
    _library().head_statistics(
        logits.data_ptr(), targets.data_ptr(), rows, size, 1 / temperature,
        torch.get_num_threads(), log_probs.data_ptr(), sums.data_ptr(),
        _address(entropies), _address(found),
    )  # fmt: skip
    return log_probs, sums, entropies, found


def head_gradients(
    logits: Tensor,
    targets: Tensor,
    sums: Tensor,
    of_log_probs: Tensor,
    temperature: float,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Gradients of logits [N, V], by those of log-probs and of the `entropy`, which comes before
    its own; of contiguous float32 [N]."""
    (entropies, of_entropy), out = entropy or (None, None), torch.empty_like(logits)
    _library().head_gradients(
        logits.data_ptr(), targets.data_ptr(), sums.data_ptr(), of_log_probs.data_ptr(),
        _address(entropies), _address(of_entropy), *logits.shape, 1 / temperature,
        torch.get_num_threads(), out.data_ptr(),
    )  # fmt: skip
    return out


class AdamSettings(ctypes.Structure):
    """Of a step of AdamW: `factor` of the gradients, and corrections 1 − beta^step."""

    _fields_ = [
        (name, c_double)
        for name in (
            *("factor", "rate", "beta1", "beta2", "eps", "decay"),
            *("correction1", "correction2"),
        )
    ]


class _Trained(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("gradient", "master", "m", "v", "working")),
        ("count", c_int64),
    ]


def adamw(settings: AdamSettings, tensors: Sequence[tuple[Tensor, ...]]) -> None:
    """Of each (gradient, master, m, v, working) update the float32 master, its moments, and its
    bfloat16 weights: all contiguous."""
    made = (_Trained * len(tensors))()
    for index, parts in enumerate(tensors):
        made[index] = _Trained(*(part.data_ptr() for part in parts), parts[0].numel())
    count = sum(gradient.numel() for gradient, *_ in tensors)
    threads = torch.get_num_threads() if count >= _NUMBERS_OF_TWO else 1
    _library().adamw(ctypes.byref(settings), made, len(made), threads)


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None  # `takes` was asked
    return found


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
