"""Pieces of a decoder layer whose backward pass is written out; `fused` puts them in place.

All keep less than autograd would: a norm its input and one number a row, rotary nothing of its
input, an MLP neither silu(gate) nor the product. Dtypes and rounding are transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from engine.models import cpu_kernels, cpu_products
from engine.models.products import input_gradient, linear, weight_gradient

_CHUNK_ELEMENTS = 1 << 18  # whose float32 intermediates stay in a core's cache

Affine = tuple[Tensor, Tensor | None]  # weight [out, in], bias [out]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / √(mean(x²) + eps) over the last axis, of one dtype, normalised in float32."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


def add_norm(x: Tensor, plus: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """x + plus, and what the module `norm` makes of it.

    Where loops are compiled, the sum and its gradient are part of the norm's.
    """
    plus = None if plus is None else plus.contiguous()
    if cpu_kernels.takes(x, norm.weight):
        out: tuple[Tensor, Tensor] = _AddNorm.apply(x, plus, norm.weight, norm.variance_epsilon)
        return out
    total = x if plus is None else x + plus
    return total, norm(total)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x · cos + rotate_half(x) · sin; no gradient flows to cos and sin."""
    out: Tensor = _Rotate.apply(x, cos, sin)
    return out


def linears(x: Tensor, affines: Sequence[Affine]) -> tuple[Tensor, ...]:
    """x [..., in] through several linear layers."""
    flat = [tensor for affine in affines for tensor in affine]
    out: tuple[Tensor, ...] = _Linears.apply(x, None, *flat)
    return out


def rotated_linears(
    x: Tensor, affines: Sequence[Affine], cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    """x [B, L, in] through linear layers to [B, L, heads, d]; all but the last are then rotated."""
    weights, biases = zip(*affines, strict=True)
    shape = (*x.shape[:-1], -1, cos.shape[-1])
    whole = all(len(weight) % cpu_products.STEP == 0 for weight in weights)
    if whole and cpu_products.takes(x, weights, biases) and cpu_kernels.takes(cos, sin):
        flat = [tensor for affine in affines for tensor in affine]
        rotary = cpu_products.Rotary(cos, sin, len(affines) - 1)
        return tuple(out.view(shape) for out in _Linears.apply(x, rotary, *flat))
    *turned, last = (out.view(shape) for out in linears(x, affines))
    return *(rotate(out, cos, sin) for out in turned), last


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    out: Tensor = _SiluProduct.apply(gate, up)
    return out


def gated_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, residual: Tensor | None = None
) -> Tensor:
    """residual + down(silu(gate(x)) · up(x)) of three matrices [out, in]."""
    out: Tensor = _GatedMLP.apply(x, gate, up, down, residual, torch.is_grad_enabled())
    return out


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / √(mean(x²) + eps): ∂x = r · (w ∂y − x · r² · mean(w ∂y x)), ∂w = Σ ∂y x r."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if cpu_kernels.takes(x, weight):
            _, out, scale = cpu_kernels.norm(x, weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return out
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows)
        scale = torch.empty(len(rows), 1, dtype=_wide(rows[:0]).dtype, device=x.device)
        for at in _chunks(rows):
            wide = _wide(rows[at])
            norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            scale[at] = norm.square_().div_(rows.shape[1]).add_(eps).rsqrt_()
            if wide.dtype == rows.dtype:
                torch.mul(wide, scale[at], out=out[at])
            else:
                out[at] = wide.mul_(scale[at])
            out[at].mul_(weight)
        ctx.save_for_backward(x, weight, scale)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        if cpu_kernels.takes(x, weight):
            return *cpu_kernels.norm_gradients(x, weight, scale, gradients[0].contiguous()), None
        width = x.shape[-1]
        rows, above = x.reshape(-1, width), gradients[0].reshape(-1, width)
        to_weight = ctx.needs_input_grad[1]
        grad = torch.empty_like(rows)
        wide_weight = _wide(weight)
        of_weight = torch.zeros_like(wide_weight)
        for at in _chunks(rows):
            wide, top, r = _wide(rows[at]), _wide(above[at]), scale[at]
            product = top * wide
            if to_weight:
                of_weight.addmv_(product.t(), r.squeeze(1))
            dot = torch.mv(product, wide_weight)[:, None]
            part = torch.mul(top, wide_weight, out=product).mul_(r)
            part.addcmul_(wide, dot.mul_(r * r).mul_(r).div_(width), value=-1.0)
            grad[at] = part
        return grad.view(x.shape), of_weight.to(weight.dtype) if to_weight else None, None


class _AddNorm(torch.autograd.Function):
    """As _RMSNorm, of a residual stream."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plus: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, out, scale = cpu_kernels.norm(x, weight, eps, plus)
        ctx.save_for_backward(total, weight, scale)
        ctx.two = plus is not None
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_total, of_out = (gradient.contiguous() for gradient in gradients)
        x, weight, scale = ctx.saved_tensors
        of_x, of_weight = cpu_kernels.norm_gradients(x, weight, scale, of_out, of_total)
        return of_x, of_x if ctx.two else None, of_weight, None


class _Rotate(torch.autograd.Function):
    """The gradient is rotated back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        if cpu_kernels.takes(x, cos, sin):
            return cpu_kernels.rotate(x, cos, sin)
        half = x.shape[-1] // 2
        out = torch.mul(x, cos)
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1.0)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (cos, sin), above = ctx.saved_tensors, gradients[0]
        if cpu_kernels.takes(cos, sin) and above.dtype == torch.bfloat16:
            return cpu_kernels.rotate(above.contiguous(), cos, sin, back=True), None, None
        half = above.shape[-1] // 2
        out = torch.mul(above, cos, out=above.new_empty(above.shape))  # contiguous
        out[..., :half].addcmul_(above[..., half:], sin[..., half:])
        out[..., half:].addcmul_(above[..., :half], sin[..., :half], value=-1.0)
        return out, None, None


class _Linears(torch.autograd.Function):
    """The gradients of the input are summed by the products that make them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rotary: cpu_products.Rotary | None, *affines: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = affines[::2], affines[1::2]
        ctx.save_for_backward(x, *weights)
        ctx.compiled = cpu_products.takes(x, weights, biases)  # type: ignore[arg-type]
        if ctx.compiled:
            ctx.rotary, rows = rotary, x.reshape(-1, x.shape[-1])
            outs = cpu_products.linears(rows, weights, biases, rotary)  # type: ignore[arg-type]
            return tuple(out.view(*x.shape[:-1], -1) for out in outs)
        return tuple(linear(x, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        if ctx.compiled:
            to_x, _, *wanted = ctx.needs_input_grad
            of_rows, found = cpu_products.linear_gradients(
                rows,
                weights,
                [gradient.contiguous() for gradient in gradients],
                to_x=to_x,
                to_weights=wanted[::2],
                to_biases=wanted[1::2],
                rotary=ctx.rotary,
            )
            return None if of_rows is None else of_rows.view(x.shape), None, *found
        of_x: Tensor | None = None
        out: list[Tensor | None] = []
        for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            above = gradient.reshape(-1, weight.shape[0])
            if ctx.needs_input_grad[0]:
                of_x = input_gradient(above, weight, of_x)
            to_weight, to_bias = ctx.needs_input_grad[2 + 2 * index : 4 + 2 * index]
            out.append(weight_gradient(above, rows) if to_weight else None)
            out.append(_column_sums(above) if to_bias else None)
        return (None if of_x is None else of_x.view(x.shape), None, *out)


class _SiluProduct(torch.autograd.Function):
    """Keeps gate and up; silu(gate) is computed again."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        above = gradients[0]
        if cpu_kernels.takes(gate, up):
            above = above.clone(memory_format=torch.contiguous_format)
            return cpu_kernels.silu_product_gradients(gate, up, above, product=False)[:2]
        of_up = F.silu(gate).mul_(above)
        return _silu_gradient(above * up, gate), of_up


class _GatedMLP(torch.autograd.Function):
    """Keeps the outputs of gate and up; silu and the product are computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        residual: Tensor | None,
        keep: bool,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.compiled = cpu_products.takes(rows, [gate, up, down], [residual])
        if ctx.compiled:
            out, *kept = cpu_products.mlp(rows, gate, up, down, residual, keep=keep)
            ctx.save_for_backward(x, gate, up, down, *kept)
            return out.view(x.shape)
        gated, raised = linear(rows, gate), linear(rows, up)
        ctx.save_for_backward(x, gate, up, down, gated, raised)
        out = linear(_gated(gated, raised), down).view(*x.shape[:-1], down.shape[0])
        return out if residual is None else residual + out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, gated, raised = ctx.saved_tensors
        to_x, to_gate, to_up, to_down, to_residual, _ = ctx.needs_input_grad
        of_residual = gradients[0] if to_residual else None
        rows = x.reshape(-1, x.shape[-1])
        above = gradients[0].reshape(-1, down.shape[0])
        if ctx.compiled:
            of_rows, *found = cpu_products.mlp_gradients(
                [gate, up, down],
                rows,
                [gated, raised],
                above.contiguous(),
                to_x=to_x,
                to_weights=to_gate or to_up or to_down,
            )
            of_x = None if of_rows is None else of_rows.view(x.shape)
            return of_x, *found, of_residual, None
        of_product = input_gradient(above, down)
        of_gated, of_raised, product = _gated_gradients(gated, raised, of_product, to_down)
        of_down = None if product is None else weight_gradient(above, product)
        of_x = None
        if to_x:
            of_x = input_gradient(of_raised, up, input_gradient(of_gated, gate)).view(x.shape)
        return (
            of_x,
            weight_gradient(of_gated, rows) if to_gate else None,
            weight_gradient(of_raised, rows) if to_up else None,
            of_down,
            of_residual,
            None,
        )


def _column_sums(above: Tensor) -> Tensor:
    return cpu_kernels.column_sums(above) if cpu_kernels.takes(above) else above.sum(0)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    if cpu_kernels.takes(gate, up):
        return cpu_kernels.silu_product(gate, up)
    return F.silu(gate).mul_(up)


def _gated_gradients(
    gate: Tensor, up: Tensor, above: Tensor, product: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of gate and up, in the memory of `above`; and, where asked for, silu(gate) · up."""
    if cpu_kernels.takes(gate, up, above):
        return cpu_kernels.silu_product_gradients(gate, up, above, product=product)
    silu = F.silu(gate)
    out = silu * up if product else None
    of_up = silu.mul_(above)
    return _silu_gradient(above.mul_(up), gate), of_up, out


def _silu_gradient(above: Tensor, gate: Tensor) -> Tensor:
    """∂silu(gate), written over `above`."""
    torch.ops.aten.silu_backward.grad_input(above, gate, grad_input=above)
    return above


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _chunks(rows: Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, rows.shape[1]))
    for start in range(0, len(rows), size):
        yield slice(start, start + size)
