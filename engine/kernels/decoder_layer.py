"""Pieces of a decoder layer, and whole layers, whose backward pass is written out.

All keep less than autograd would: a norm its input and one number a row, rotary nothing of its
input, an MLP neither silu(gate) nor the product. Dtypes and rounding are transformers' own. Between
its compiled functions a layer of a small model is Python, modules and autograd's nodes on one
thread; as one autograd function it is one node, with the same numbers to the bit. `engine.models`
puts these in place of transformers' modules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from engine.algorithms.masked import at_least_float
from engine.kernels import training_ops
from engine.kernels.attention import Run, attention_forward, attention_gradients, takes_runs
from engine.kernels.choices import all_compiled
from engine.kernels.training_ops import Rotary, RowsRead, input_gradient, linear, weight_gradient

_CHUNK_ELEMENTS = 1 << 18  # whose float32 intermediates stay in a core's cache

Affine = tuple[Tensor, Tensor | None]  # weight [out, in], bias [out]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight · x / √(mean(x²) + eps) over the last axis; one dtype, float32 inside."""
    return _RMSNorm.apply(x, weight, eps)


def add_norm(x: Tensor, plus: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """Return x + plus and its `norm` (a module), in one pass where loops are compiled."""
    plus = None if plus is None else plus.contiguous()
    if training_ops.takes(x, norm.weight):
        return _AddNorm.apply(x, plus, norm.weight, norm.variance_epsilon)
    total = x if plus is None else x + plus
    return total, norm(total)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x · cos + rotate_half(x) · sin; no gradient flows to cos and sin."""
    return _Rotate.apply(x, cos, sin)


def linears(x: Tensor, affines: Sequence[Affine]) -> tuple[Tensor, ...]:
    """Apply several linear layers to x [..., in]."""
    flat = [tensor for affine in affines for tensor in affine]
    return _Linears.apply(x, None, *flat)


def rotated_linears(
    x: Tensor, affines: Sequence[Affine], cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    """Apply linear layers to x [B, L, in], to [B, L, heads, d]; rotate all but the last."""
    weights, biases = zip(*affines, strict=True)
    shape = (*x.shape[:-1], -1, cos.shape[-1])
    divisible = all(len(weight) % training_ops.STEP == 0 for weight in weights)
    compiles = divisible and training_ops.takes(cos, sin)
    if compiles and training_ops.compiles_linears(x, weights, biases):
        flat = [tensor for affine in affines for tensor in affine]
        rotary = Rotary(cos, sin, len(affines) - 1)
        return tuple(out.view(shape) for out in _Linears.apply(x, rotary, *flat))
    *to_rotate, last = (out.view(shape) for out in linears(x, affines))
    return *(rotate(out, cos, sin) for out in to_rotate), last


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    return _SiluProduct.apply(gate, up)


def gated_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Return residual + down(silu(gate(x)) · up(x)) of three matrices [out, in]."""
    return _GatedMLP.apply(x, gate, up, down, residual, torch.is_grad_enabled())


class _RMSNorm(torch.autograd.Function):
    """RMSNorm: r = 1 / √(mean(x²) + eps), ∂x = r (w ∂y − x r² mean(w ∂y x)), ∂w = Σ ∂y x r."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if training_ops.takes(x, weight):
            _, out, scale = training_ops.norm(x, weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return out
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows)
        scale = torch.empty(len(rows), 1, dtype=at_least_float(rows[:0]).dtype, device=x.device)
        for at in _chunks(rows):
            wide = at_least_float(rows[at])
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
        if training_ops.takes(x, weight):
            return *training_ops.norm_gradients(x, weight, scale, gradients[0].contiguous()), None
        width = x.shape[-1]
        rows, grad_output = x.reshape(-1, width), gradients[0].reshape(-1, width)
        needs_weight_grad = ctx.needs_input_grad[1]
        grad_x = torch.empty_like(rows)
        wide_weight = at_least_float(weight)
        grad_weight = torch.zeros_like(wide_weight)
        for at in _chunks(rows):
            wide, wide_grad = at_least_float(rows[at]), at_least_float(grad_output[at])
            r = scale[at]
            product = wide_grad * wide
            if needs_weight_grad:
                grad_weight.addmv_(product.t(), r.squeeze(1))
            dot = torch.mv(product, wide_weight)[:, None]
            part = torch.mul(wide_grad, wide_weight, out=product).mul_(r)
            part.addcmul_(wide, dot.mul_(r * r).mul_(r).div_(width), value=-1.0)
            grad_x[at] = part
        narrow = grad_weight.to(weight.dtype) if needs_weight_grad else None
        return grad_x.view(x.shape), narrow, None


class _AddNorm(torch.autograd.Function):
    """The RMSNorm of a residual stream, with what is added to the stream first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plus: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, out, scale = training_ops.norm(x, weight, eps, plus)
        ctx.save_for_backward(total, weight, scale)
        ctx.two = plus is not None
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_total, grad_out = (gradient.contiguous() for gradient in gradients)
        x, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = training_ops.norm_gradients(x, weight, scale, grad_out, grad_total)
        return grad_x, grad_x if ctx.two else None, grad_weight, None


class _Rotate(torch.autograd.Function):
    """The gradient is rotated back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        if training_ops.takes(x, cos, sin):
            return training_ops.rotate(x, cos, sin)
        half = x.shape[-1] // 2
        out = torch.mul(x, cos)
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1.0)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (cos, sin), grad_output = ctx.saved_tensors, gradients[0]
        if training_ops.takes(cos, sin) and grad_output.dtype == torch.bfloat16:
            return training_ops.rotate(grad_output.contiguous(), cos, sin, back=True), None, None
        half = grad_output.shape[-1] // 2
        contiguous = grad_output.new_empty(grad_output.shape)
        grad_x = torch.mul(grad_output, cos, out=contiguous)
        grad_x[..., :half].addcmul_(grad_output[..., half:], sin[..., half:])
        grad_x[..., half:].addcmul_(grad_output[..., :half], sin[..., :half], value=-1.0)
        return grad_x, None, None


class _Linears(torch.autograd.Function):
    """The gradients of the input are summed by the products that make them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rotary: Rotary | None, *affines: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = affines[::2], affines[1::2]
        ctx.save_for_backward(x, *weights)
        ctx.compiled = rotary is not None or training_ops.compiles_linears(x, weights, biases)  # type: ignore[arg-type]
        if ctx.compiled:
            ctx.rotary, rows = rotary, x.reshape(-1, x.shape[-1])
            outs = training_ops.linears(rows, weights, biases, rotary)  # type: ignore[arg-type]
            return tuple(out.view(*x.shape[:-1], -1) for out in outs)
        return tuple(linear(x, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        if ctx.compiled:
            needs_grad_x, _, *needs_affine_grads = ctx.needs_input_grad
            grad_rows, compiled_grads = training_ops.linear_gradients(
                rows,
                weights,
                [gradient.contiguous() for gradient in gradients],
                to_x=needs_grad_x,
                to_weights=needs_affine_grads[::2],
                to_biases=needs_affine_grads[1::2],
                rotary=ctx.rotary,
            )
            return None if grad_rows is None else grad_rows.view(x.shape), None, *compiled_grads
        grad_x: Tensor | None = None
        grad_affines: list[Tensor | None] = []
        for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            grad_output = gradient.reshape(-1, weight.shape[0])
            if ctx.needs_input_grad[0]:
                grad_x = input_gradient(grad_output, weight, grad_x)
            to_weight, to_bias = ctx.needs_input_grad[2 + 2 * index : 4 + 2 * index]
            grad_affines.append(weight_gradient(grad_output, rows) if to_weight else None)
            grad_affines.append(training_ops.column_sums(grad_output) if to_bias else None)
        return (None if grad_x is None else grad_x.view(x.shape), None, *grad_affines)


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
        grad_output = gradients[0]
        if training_ops.takes(gate, up):
            grad_output = grad_output.clone(memory_format=torch.contiguous_format)
            return training_ops.silu_product_gradients(gate, up, grad_output, product=False)[:2]
        grad_up = F.silu(gate).mul_(grad_output)
        return _silu_gradient(grad_output * up, gate), grad_up


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
        choice = training_ops.choose_mlp(rows, gate, up, down, residual)
        ctx.compiled = choice is not None and choice.is_compiled
        if ctx.compiled:
            out, *saved = training_ops.mlp(rows, gate, up, down, residual, keep=keep)
            ctx.save_for_backward(x, gate, up, down, *saved)
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
        grad_residual = gradients[0] if to_residual else None
        rows = x.reshape(-1, x.shape[-1])
        grad_output = gradients[0].reshape(-1, down.shape[0])
        if ctx.compiled:
            grad_rows, *grad_matrices = training_ops.mlp_gradients(
                [gate, up, down],
                rows,
                [gated, raised],
                grad_output.contiguous(),
                to_x=to_x,
                to_weights=to_gate or to_up or to_down,
            )
            grad_x = None if grad_rows is None else grad_rows.view(x.shape)
            return grad_x, *grad_matrices, grad_residual, None
        grad_product = input_gradient(grad_output, down)
        grad_gated, grad_raised, product = _gated_gradients(gated, raised, grad_product, to_down)
        grad_down = None if product is None else weight_gradient(grad_output, product)
        grad_x = None
        if to_x:
            grad_x = input_gradient(grad_raised, up, input_gradient(grad_gated, gate)).view(x.shape)
        return (
            grad_x,
            weight_gradient(grad_gated, rows) if to_gate else None,
            weight_gradient(grad_raised, rows) if to_up else None,
            grad_down,
            grad_residual,
            None,
        )


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    if training_ops.takes(gate, up):
        return training_ops.silu_product(gate, up)
    return F.silu(gate).mul_(up)


def _gated_gradients(
    gate: Tensor, up: Tensor, grad_output: Tensor, product: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of gate and up; and silu(gate) · up if `product`."""
    if training_ops.takes(gate, up, grad_output):
        return training_ops.silu_product_gradients(gate, up, grad_output, product=product)
    silu = F.silu(gate)
    out = silu * up if product else None
    grad_up = silu.mul_(grad_output)
    return _silu_gradient(grad_output.mul_(up), gate), grad_up, out


def _silu_gradient(grad_output: Tensor, gate: Tensor) -> Tensor:
    """Return the gradient of silu(gate), written over `grad_output`."""
    torch.ops.aten.silu_backward.grad_input(grad_output, gate, grad_input=grad_output)
    return grad_output


def _chunks(rows: Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, rows.shape[1]))
    for start in range(0, len(rows), size):
        yield slice(start, start + size)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's trained tensors: norms [H], matrices [out, in], biases [out]."""

    norms: tuple[Tensor, Tensor]  # before attention, before the MLP
    projections: tuple[Tensor, ...]  # of queries, keys, values
    biases: tuple[Tensor | None, ...]
    out: Tensor
    out_bias: Tensor | None
    mlp: tuple[Tensor, ...]  # gate, up, down


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What else a layer computes with."""

    rotary: Rotary
    runs: tuple[Run, ...]
    scale: float
    eps: tuple[float, float]
    read: RowsRead | None  # whose outputs there are; None: all
    keep: bool  # for a backward pass


def takes_layer(x: Tensor, weights: LayerWeights, call: LayerCall) -> bool:
    """Whether `compiled_layer` computes this, and faster than its parts; x: [1, T, H]."""
    d = call.rotary.cos.shape[-1]
    if not (
        d % training_ops.STEP == 0
        and training_ops.takes(*weights.norms, call.rotary.cos, call.rotary.sin)
        and takes_runs(call.runs, len(weights.projections[1]) // d)
    ):
        return False
    attended = x.new_empty(x.numel() // x.shape[-1], weights.out.shape[1])
    choices = (
        training_ops.choose_linears(x, weights.projections, weights.biases),
        training_ops.choose_linears(attended, [weights.out], [weights.out_bias]),
        training_ops.choose_mlp(x, *weights.mlp),
    )
    return None not in choices and all_compiled([each for each in choices if each is not None])


def compiled_layer(x: Tensor, weights: LayerWeights, call: LayerCall) -> Tensor:
    """Return the layer's outputs [1, N, H] of `call.read`, or of all T tokens of x [1, T, H]."""
    affines = zip(weights.projections, weights.biases, strict=True)
    flat = [tensor for affine in affines for tensor in affine]
    return _Layer.apply(x, call, *weights.norms, *weights.mlp, *flat, weights.out, weights.out_bias)


class _Layer(torch.autograd.Function):
    """What its passes share are the tensors that it saves, in the order of the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        call: LayerCall,
        norm: Tensor,
        last_norm: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        *affines: Tensor | None,
    ) -> Tensor:
        *matrices, last = affines[::2]
        *biases, last_bias = affines[1::2]
        residual, read = x[0], call.read
        _, normed, scale = training_ops.norm(residual, norm, call.eps[0])
        projected = training_ops.linears(normed, matrices, biases, call.rotary)  # type: ignore[arg-type]
        heads = _heads(projected, call)
        out, softmax = attention_forward(heads[0], heads[1], heads[2], call.runs, call.scale)
        attended = out.view(len(residual), -1)
        saved = [residual, normed, scale, *projected, softmax]
        if read is not None:
            attended = attended.index_select(0, read.index)
            residual = residual.index_select(0, read.index)
        [plus] = training_ops.linears(attended, [last], [last_bias])  # type: ignore[list-item]
        total, inner, last_scale = training_ops.norm(residual, last_norm, call.eps[1], plus)
        result, *raised = training_ops.mlp(inner, gate, up, down, total, keep=call.keep)
        ctx.call = call
        ctx.save_for_backward(
            *saved, attended, total, inner, last_scale, *raised,
            norm, last_norm, gate, up, down, *matrices, last,
        )  # fmt: skip
        return result[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: LayerCall = ctx.call
        x, normed, scale, *saved = ctx.saved_tensors
        q, k, v, softmax, attended, total, inner, last_scale, *saved = saved
        gated, raised, norm, last_norm, gate, up, down, *matrices, last = saved
        _, _, *needs_grads = ctx.needs_input_grad
        to_mlp, to_affines = any(needs_grads[2:5]), needs_grads[5:]
        grad_output = gradients[0][0].contiguous()
        grad_inner, *grad_mlp = training_ops.mlp_gradients(
            [gate, up, down], inner, [gated, raised], grad_output, to_x=True, to_weights=to_mlp
        )
        assert grad_inner is not None
        plus, grad_last_norm = training_ops.norm_gradients(
            total, last_norm, last_scale, grad_inner, grad_output
        )
        grad_attended, grad_last = training_ops.linear_gradients(
            attended, [last], [plus], to_x=True,
            to_weights=[to_affines[-2]], to_biases=[to_affines[-1]],
        )  # fmt: skip
        assert grad_attended is not None
        if call.read is not None:
            grad_attended = call.read.scatter(grad_attended, len(x))
            plus = call.read.scatter(plus, len(x))
        d = call.rotary.cos.shape[-1]
        grad_heads = attention_gradients(
            _heads([q, k, v], call), softmax, grad_attended.view(1, len(x), -1, d),
            call.runs, call.scale,
        )  # fmt: skip
        grad_normed, grad_projections = training_ops.linear_gradients(
            normed, matrices, [grad.view(len(x), -1) for grad in grad_heads], to_x=True,
            to_weights=to_affines[:-2:2], to_biases=to_affines[1:-2:2], rotary=call.rotary,
        )  # fmt: skip
        assert grad_normed is not None
        grad_x, grad_norm = training_ops.norm_gradients(x, norm, scale, grad_normed, plus)
        grad_norms = grad_norm, grad_last_norm
        return grad_x[None], None, *grad_norms, *grad_mlp, *grad_projections, *grad_last


def _heads(rows: Sequence[Tensor], call: LayerCall) -> list[Tensor]:
    """View rows [T, heads · d] as [1, heads, T, d]."""
    d = call.rotary.cos.shape[-1]
    return [tensor.view(1, len(tensor), -1, d).transpose(1, 2) for tensor in rows]
