"""A decoder layer over packed rows as one autograd function, where all of it is compiled.

Between its compiled functions a layer of a small model is Python, modules and autograd's nodes, on
one thread; here it is one node. The numbers are those of the parts in `fused_functions`, to the
bit. `fused_forwards` calls it for layers without adapters and hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.models import cpu_kernels, cpu_products
from engine.models.compiled_attention import attention_forward, attention_gradients, takes_runs
from engine.models.cpu_products import Rotary
from engine.models.row_attention import Run
from engine.models.rows_read import RowsRead


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
    """Whether `compiled_layer` computes this; x: [1, T, H]."""
    d = call.rotary.cos.shape[-1]
    matrices = [*weights.projections, weights.out, *weights.mlp]
    biases = [*weights.biases, weights.out_bias, *weights.norms, call.rotary.cos, call.rotary.sin]
    return (
        d % cpu_products.STEP == 0
        and cpu_products.takes(x, matrices, biases)
        and takes_runs(call.runs, len(weights.projections[1]) // d)
    )


def compiled_layer(x: Tensor, weights: LayerWeights, call: LayerCall) -> Tensor:
    """The layer's outputs [1, N, H] of `call.read`, or of all T tokens of x [1, T, H].

    All is bfloat16 on the CPU, as `takes_layer` has found; the gradient of a gradient is an error.
    """
    affines = zip(weights.projections, weights.biases, strict=True)
    flat = [tensor for affine in affines for tensor in affine]
    out: Tensor = _Layer.apply(
        x, call, *weights.norms, *weights.mlp, *flat, weights.out, weights.out_bias
    )
    return out


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
        _, normed, scale = cpu_kernels.norm(residual, norm, call.eps[0])
        projected = cpu_products.linears(normed, matrices, biases, call.rotary)  # type: ignore[arg-type]
        heads = _heads(projected, call)
        out, softmax = attention_forward(heads[0], heads[1], heads[2], call.runs, call.scale)
        attended = out.view(len(residual), -1)
        kept = [residual, normed, scale, *projected, softmax]
        if read is not None:
            attended = attended.index_select(0, read.index)
            residual = residual.index_select(0, read.index)
        [plus] = cpu_products.linears(attended, [last], [last_bias])  # type: ignore[list-item]
        total, inner, last_scale = cpu_kernels.norm(residual, last_norm, call.eps[1], plus)
        result, *raised = cpu_products.mlp(inner, gate, up, down, total, keep=call.keep)
        ctx.call = call
        ctx.save_for_backward(
            *kept, attended, total, inner, last_scale, *raised,
            norm, last_norm, gate, up, down, *matrices, last,
        )  # fmt: skip
        return result[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: LayerCall = ctx.call
        x, normed, scale, *rest = ctx.saved_tensors
        q, k, v, softmax, attended, total, inner, last_scale, *rest = rest
        gated, raised, norm, last_norm, gate, up, down, *matrices, last = rest
        _, _, *wanted = ctx.needs_input_grad
        to_mlp, to_affines = any(wanted[2:5]), wanted[5:]
        above = gradients[0][0].contiguous()
        of_inner, *of_mlp = cpu_products.mlp_gradients(
            [gate, up, down], inner, [gated, raised], above, to_x=True, to_weights=to_mlp
        )
        assert of_inner is not None
        plus, of_last_norm = cpu_kernels.norm_gradients(
            total, last_norm, last_scale, of_inner, above
        )
        of_attended, of_last = cpu_products.linear_gradients(
            attended, [last], [plus], to_x=True,
            to_weights=[to_affines[-2]], to_biases=[to_affines[-1]],
        )  # fmt: skip
        assert of_attended is not None
        if call.read is not None:
            of_attended = call.read.scatter(of_attended, len(x))
            plus = call.read.scatter(plus, len(x))
        d = call.rotary.cos.shape[-1]
        of_heads = attention_gradients(
            _heads([q, k, v], call), softmax, of_attended.view(1, len(x), -1, d),
            call.runs, call.scale,
        )  # fmt: skip
        of_normed, of_projections = cpu_products.linear_gradients(
            normed, matrices, [of.view(len(x), -1) for of in of_heads], to_x=True,
            to_weights=to_affines[:-2:2], to_biases=to_affines[1:-2:2], rotary=call.rotary,
        )  # fmt: skip
        assert of_normed is not None
        of_x, of_norm = cpu_kernels.norm_gradients(x, norm, scale, of_normed, plus)
        return of_x[None], None, of_norm, of_last_norm, *of_mlp, *of_projections, *of_last


def _heads(rows: Sequence[Tensor], call: LayerCall) -> list[Tensor]:
    """Rows [T, heads · d] as [1, heads, T, d]."""
    d = call.rotary.cos.shape[-1]
    return [each.view(1, len(each), -1, d).transpose(1, 2) for each in rows]
