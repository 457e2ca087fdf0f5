"""Forwards of a decoder's modules on CUDA, of Liger-Kernel's functions; `fused` puts them in place.

Norms, rotary positions and silu(gate) · up are one kernel each, forward and backward, in place
of
up to eight of torch's. Matrix products and attention are the modules' own, so adapters,
quantised
weights and FSDP's shards are what they were. Liger-Kernel (arXiv:2410.10989) is optional.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@functools.cache
def is_installed() -> bool:
    """Whether Liger-Kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def norm_forward(module: Any, plain: Callable[..., Tensor], hidden_states: Tensor) -> Tensor:
    """Replace a norm's forward; it rounds where transformers' norm rounds."""
    if hidden_states.dtype != module.weight.dtype:
        return plain(hidden_states)
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # Not in place: the gradient of its output may be read elsewhere.
    options = (module.variance_epsilon, 0.0, "llama", False)
    out: Tensor = LigerRMSNormFunction.apply(hidden_states, module.weight, *options)
    return out


def mlp_forward(module: Any, plain: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Replace an MLP's forward; the gradients of gate and up are written over them."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    product = LigerSiLUMulFunction.apply(module.gate_proj(x), module.up_proj(x))
    out: Tensor = module.down_proj(product)
    return out


def attention_forward(
    module: Any,
    plain: Callable[..., tuple[Tensor, Tensor | None]],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: object = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Replace an attention module's forward; with a cache the module's own forward runs."""
    cos, sin = position_embeddings
    if past_key_values is not None or cos.shape[-1] != module.head_dim:
        return plain(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
    from liger_kernel.ops.rope import LigerRopeFunction

    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    query, key, value = (
        projection(hidden_states).view(shape)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    query, key = LigerRopeFunction.apply(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    attend: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
        module.config._attn_implementation,
        sys.modules[type(module).__module__].eager_attention_forward,
    )
    out, weights = attend(
        module,
        query,
        key,
        value.transpose(1, 2),
        attention_mask,
        dropout=module.attention_dropout if module.training else 0.0,
        scaling=module.scaling,
        sliding_window=getattr(
            module, "sliding_window", getattr(module.config, "sliding_window", None)
        ),
        **kwargs,
    )
    return module.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


def takes_device(device: torch.device) -> bool:
    """Whether modules on `device` get these forwards."""
    return device.type == "cuda" and torch.version.cuda is not None and is_installed()
