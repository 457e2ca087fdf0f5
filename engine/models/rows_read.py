"""Tokens of packed rows whose outputs are read, for a last layer that leaves the others out.

What follows its attention, most of a layer, is computed for these alone: of prompt and response the
response's. `fused` has the layer, `forward` says which tokens they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.models.products import recurring_size


@dataclass(frozen=True, slots=True)
class RowsRead:
    """Which of a packed sequence's tokens are read: the others' outputs are left out."""

    index: Tensor  # [N] long; behind the first `count`, all of them different, any
    count: int

    @classmethod
    def at(cls, index: Tensor) -> RowsRead:
        """Those at `index` [n], all different, and more up to a `recurring_size`."""
        missing = recurring_size(len(index)) - len(index)
        return cls(F.pad(index, (0, missing)), len(index))

    def of(self, x: Tensor) -> Tensor:
        """Of x [1, T, H] those rows: [1, N, H]."""
        out: Tensor = _TakeRows.apply(x, self.index, self.count)
        return out


class _TakeRows(torch.autograd.Function):
    """No two rows are added up in the backward pass, where index_select's is made for that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.tokens, ctx.count = x.shape[1], count
        return x[0].index_select(0, index)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        [above], [index] = gradients, ctx.saved_tensors
        out = above.new_zeros(1, ctx.tokens, above.shape[2])
        out[0].index_copy_(0, index[: ctx.count], above[0, : ctx.count])
        return out, None, None
