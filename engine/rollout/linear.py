"""The kernel that multiplies activations with unpacked weights, for engines that share storage.

Both kernels read a weight where the trainer keeps it, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def linear_function(weight: Tensor) -> LinearFunction:
    """Return the faster `(x, weight, bias) → x·weightᵀ + bias` for a weight's device and dtype.

    MKL's float32 product runs on AMD processors at half of oneDNN's rate; on Intel's it is the
    faster one. The choice is a rule and not a timing, so that a run repeats bit for bit.
    """
    slow_mkl = weight.device.type == "cpu" and weight.dtype == torch.float32 and _is_amd()
    return _onednn_linear if slow_mkl and torch.backends.mkldnn.is_available() else F.linear


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's linear on plain weights; it has no gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@cache
def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux: keep PyTorch's own choice
        return False
