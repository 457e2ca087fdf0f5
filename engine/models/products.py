"""Matrix products of a linear layer, forward and backward, by the faster of two libraries.

MKL computes float32 on AMD processors at half of oneDNN's rate; elsewhere, and in bfloat16, torch's
own choice is the faster one. The choice is a rule and not a timing, so that a run repeats bit for
bit. Nothing here has a gradient: callers write their backward out.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGEST_STEP = 8  # log2 of what is between two sizes


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] · weightᵀ [in, out] + bias [out]."""
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def input_gradient(above: Tensor, weight: Tensor, plus: Tensor | None = None) -> Tensor:
    """above [n, out] · weight [out, in], added to `plus` [n, in], which it may write over."""
    if not _by_onednn(above, weight):
        return above @ weight if plus is None else plus.addmm_(above, weight)
    if plus is None:
        return linear(above, weight.t())
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(above, plus, weight.t(), None, "add")
    return out


def weight_gradient(above: Tensor, x: Tensor) -> Tensor:
    """aboveᵀ [out, n] · x [n, in]."""
    return linear(above.t(), x.t())


def recurring_size(count: int) -> int:
    """`count` rounded up by a few per cent, so that sizes that vary come again and again.

    oneDNN compiles a kernel for each new shape of a product: a millisecond, and up to a megabyte.
    """
    step = 1 << min(_LARGEST_STEP, max(4, count.bit_length() - 5))
    return -(-count // step) * step


def _by_onednn(left: Tensor, right: Tensor) -> bool:
    same = left.dtype == right.dtype == torch.float32
    return same and left.device.type == "cpu" and left.numel() > 0 and _mkl_is_slow()


@cache
def _mkl_is_slow() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux: keep torch's own choice
        return False
