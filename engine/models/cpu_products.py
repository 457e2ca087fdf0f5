"""Linear layers and the gated MLP in training as compiled functions: `cpu/products.h`.

In bfloat16 on CPUs that multiply it (AVX512-BF16). A library computes one product after the other,
and each goes over memory; here each thread takes a block of rows through all that follows on each
other, while it is in the thread's cache. Gradients of weights are float32 sums, as optimizers
accumulate them. The outputs of a row don't depend on the other rows. Nothing here has a gradient:
`fused_functions` calls these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models import cpu_kernels

STEP = 16  # widths of inputs are multiples of it; those of outputs that are rotated, too
_LARGEST = 1 << 19  # elements of a matrix; beyond, oneDNN's products are the faster ones

_MLP = (
    *("x", "gate", "up", "down", "gated", "raised", "out", "above"),
    *("of_gate", "of_up", "of_down", "residual"),
)
_AFFINE = ("weight", "bias", "out", "above", "of_weight", "of_bias")


class _Mlp(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in _MLP),
        *((name, c_int64) for name in ("rows", "hidden", "inner", "threads")),
    ]


class _Affine(ctypes.Structure):
    _fields_ = [*((name, c_void_p) for name in _AFFINE), ("width", c_int64), ("rotated", c_int64)]


class _Linears(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "of_x", "parts", "cos", "sin")),
        *((name, c_int64) for name in ("count", "rows", "in", "threads", "period", "d")),
    ]


class Rotary(NamedTuple):
    """cos and sin [B or 1, L, 1, d] of positions, and how many outputs are rotated."""

    cos: Tensor
    sin: Tensor
    outputs: int


def takes(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> bool:
    """Whether the functions here compute with these."""
    given = [bias for bias in biases if bias is not None]
    return (
        all(weight.shape[1] % STEP == 0 for weight in weights)
        and all(weight.numel() <= _LARGEST for weight in weights)
        and cpu_kernels.takes(x, *weights, *given)
    )


def mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    residual: Tensor | None = None,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """residual + down(silu(gate(x)) · up(x)) of rows x [n, H]; with `keep` also gate(x) and
    up(x)."""
    out = torch.empty_like(x)
    gated, raised = (x.new_empty(len(x), len(gate)) if keep else None for _ in range(2))
    every = (x, gate, up, down, gated, raised, out, None, None, None, None, residual)
    _call("mlp_forward", _mlp_of(every))
    return out, gated, raised


def mlp_gradients(
    matrices: Sequence[Tensor],
    x: Tensor,
    kept: Sequence[Tensor],
    above: Tensor,
    *,
    to_x: bool,
    to_weights: bool,
) -> list[Tensor | None]:
    """Gradients of x and, in float32, of the three `matrices`; `kept`: gate(x) and up(x)."""
    of_x = torch.empty_like(x) if to_x else None
    found = [torch.empty_like(m, dtype=torch.float32) if to_weights else None for m in matrices]
    every = [x, *matrices, *kept, of_x, above, *found, None]
    _call("mlp_backward", _mlp_of(every))
    return [of_x, *found]


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rotary: Rotary | None = None,
) -> tuple[Tensor, ...]:
    """Rows x [n, in] through layers that share it; rotary positions on the first outputs."""
    outs = tuple(x.new_empty(len(x), len(weight)) for weight in weights)
    parts = [
        {"weight": weight, "bias": bias, "out": out}
        for weight, bias, out in zip(weights, biases, outs, strict=True)
    ]
    given, _parts = _linears_of(x, None, parts, rotary)
    _call("linears_forward", given)
    return outs


def linear_gradients(
    x: Tensor,
    weights: Sequence[Tensor],
    above: Sequence[Tensor],
    *,
    to_x: bool,
    to_weights: Sequence[bool],
    to_biases: Sequence[bool],
    rotary: Rotary | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of x and, in float32, of each weight and bias in turn."""
    of_x = torch.empty_like(x) if to_x else None
    parts: list[dict[str, Tensor | None]] = []
    for weight, top, wanted, bias in zip(weights, above, to_weights, to_biases, strict=True):
        of_weight = torch.empty_like(weight, dtype=torch.float32) if wanted else None
        of_bias = weight.new_empty(len(weight), dtype=torch.float32) if bias else None
        parts.append({"weight": weight, "above": top, "of_weight": of_weight, "of_bias": of_bias})
    given, _parts = _linears_of(x, of_x, parts, rotary)
    _call("linears_backward", given)
    return of_x, [part[name] for part in parts for name in ("of_weight", "of_bias")]


def _mlp_of(tensors: Sequence[Tensor | None]) -> _Mlp:
    x, gate, *_ = tensors
    assert x is not None
    assert gate is not None
    return _Mlp(*map(_address, tensors), *x.shape, len(gate), torch.get_num_threads())


def _linears_of(
    x: Tensor,
    of_x: Tensor | None,
    parts: Sequence[dict[str, Tensor | None]],
    rotary: Rotary | None,
) -> tuple[_Linears, object]:
    """And what must live as long."""
    made = (_Affine * len(parts))()
    for index, (part, affine) in enumerate(zip(parts, made, strict=True)):
        for name, tensor in part.items():
            setattr(affine, name, _address(tensor))
        affine.width = len(part["weight"])  # type: ignore[arg-type]
        affine.rotated = rotary is not None and index < rotary.outputs
    cos, sin, d = (None, None, 1) if rotary is None else (*rotary[:2], rotary.cos.shape[-1])
    return _Linears(
        _address(x), _address(of_x), ctypes.addressof(made), _address(cos), _address(sin),
        len(made), *x.shape, torch.get_num_threads(), 1 if cos is None else cos.numel() // d, d,
    ), made  # fmt: skip


def _call(name: str, given: ctypes.Structure) -> None:
    library = cpu_kernels.library()
    assert library is not None  # `takes` was asked
    if not getattr(library, name)(ctypes.byref(given)):
        raise MemoryError("no memory for a layer: give micro-batches fewer tokens")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
