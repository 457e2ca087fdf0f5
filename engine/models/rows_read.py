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

from engine.models import cpu_kernels
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
        out: Tensor = _TakeRows.apply(x, self)
        return out

    def scatter(self, above: Tensor, tokens: int) -> Tensor:
        """Gradients [T, H] of all tokens by those [N, H] of what is read.

        No two rows are added up, where index_select's backward pass is made for that.
        """
        index, above = self.index[: self.count], above[: self.count]
        if cpu_kernels.takes(above):
            return cpu_kernels.scatter_rows(above, index, tokens)
        out = above.new_zeros(tokens, above.shape[1])
        return out.index_copy_(0, index, above)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, read: RowsRead) -> Tensor:
        ctx.read, ctx.tokens = read, x.shape[1]
        return x[0].index_select(0, read.index)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.read.scatter(gradients[0][0], ctx.tokens)[None], None
