"""Functions of Liger-Kernel that a decoder's modules run on CUDA; `fused` puts them in place.

Norms, rotary positions and silu(gate) · up are one kernel each, forward and backward, in place of
up to eight of torch's. Matrix products and attention are the modules' own, so adapters, quantised
weights and FSDP's shards are what they were. Liger-Kernel (arXiv:2410.10989) is optional.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@functools.cache
def is_installed() -> bool:
    """Whether Liger-Kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x over the last axis; it rounds where transformers' norm rounds."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # Not in place: the gradient of its output may be read elsewhere.
    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


def mlp_forward(module: Any, plain: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Replace an MLP's forward; the gradients of gate and up are written over them."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    product = LigerSiLUMulFunction.apply(module.gate_proj(x), module.up_proj(x))
    return module.down_proj(product)


def queries_keys_values(module: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Return an attention's tensors [B, L, heads, d], rotated by cos and sin [B, L, d]."""
    from liger_kernel.ops.rope import LigerRopeFunction

    shape = (*x.shape[:-1], -1, module.head_dim)
    query, key, value = (
        projection(x).view(shape) for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    else:  # rotated in place, and selective checkpointing may have kept the products
        query, key = query.clone(), key.clone()
    rotated = LigerRopeFunction.apply(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    return *(heads.transpose(1, 2) for heads in rotated), value


def takes_device(device: torch.device) -> bool:
    """Whether modules on `device` get these forwards."""
    return device.type == "cuda" and torch.version.cuda is not None and is_installed()
