"""The Llama family's training forward with fewer passes over memory, on the model's own parameters.

`apply_fused` gives norms, rotary positions, attention, MLP and the layers of one model instance
forwards of ours, those of `fused_forwards`, and says whether they compute what transformers' do. On
the CPU only: a GPU has better ways.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from engine.models import cpu_kernels
from engine.models.fused_forwards import (
    FusedForward,
    attention_forward,
    is_fused,
    is_sharded,
    layer_forward,
    mlp_forward,
    norm_forward,
    rotary_forward,
)

log = logging.getLogger(__name__)

_FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
_PROBE_TOKENS = 5


def apply_fused(model: Any) -> bool:
    """Give `model`, a language model, a critic or a stage of one, fused forwards in place.

    Returns whether it has them.

    Left as it is: a model of another family, on another device than the CPU, or whose first layer
    computes something else than transformers' when it is tried here.
    """
    layers = _layers(model)
    if not layers or is_fused(layers[0].mlp):
        return bool(layers)
    if not _agrees(layers[0], model):
        log.warning(
            "the fused forward of %s gives other numbers than transformers'; it is left out",
            model.config.model_type,
        )
        return False
    for module in _parts(layers, _body(model)):
        _fuse(module)
    return True


def gains_by_fusion(dtype: torch.dtype) -> bool:
    """Whether weights of `dtype` are trained in less time: float32, or where loops are compiled."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and cpu_kernels.library() is not None)


def remove_fused(model: nn.Module) -> None:
    """Give `model` transformers' forwards back."""
    for module in model.modules():
        if is_fused(module):
            _restore(module)


def _layers(model: nn.Module) -> list[Any]:
    """The decoder layers that can have fused forwards; none of a model that can't."""
    if getattr(getattr(model, "config", None), "model_type", None) not in _FAMILIES:
        return []
    body = _body(model)
    if not all(p.device.type == "cpu" and not is_sharded(p) for p in body.parameters()):
        return []
    layers = list(body.layers)
    return layers if all(_is_gated(layer.mlp) for layer in layers) else []


def _body(model: nn.Module) -> Any:
    """The decoder: that of a model or a critic; a pipeline stage is one itself."""
    return getattr(model, "base_model", model)


def _parts(layers: list[Any], body: nn.Module) -> list[nn.Module]:
    """Norms, rotary positions, attentions, MLPs and the layers themselves."""
    own = ("RMSNorm", "RotaryEmbedding")
    norms = [m for m in body.modules() if type(m).__name__.endswith(own)]
    return [*norms, *(part for layer in layers for part in (layer.self_attn, layer.mlp, layer))]


def _fuse(module: nn.Module) -> None:
    if type(module).__name__.endswith("RMSNorm"):
        module.forward = FusedForward(module, norm_forward)
    elif type(module).__name__.endswith("RotaryEmbedding"):
        module.forward = FusedForward(module, rotary_forward)
    elif hasattr(module, "self_attn"):
        module.forward = FusedForward(module, layer_forward)
    elif hasattr(module, "gate_proj"):
        module.forward = FusedForward(module, mlp_forward)
    else:
        module.forward = FusedForward(module, attention_forward)


def _restore(module: nn.Module) -> None:
    del module.__dict__["forward"]


def _is_gated(mlp: nn.Module) -> bool:
    names = ("gate_proj", "up_proj", "down_proj")
    silu = type(getattr(mlp, "act_fn", None)).__name__ in ("SiLUActivation", "SiLU")
    return silu and all(hasattr(mlp, name) for name in names)


def takes_rows_read(model: nn.Module) -> bool:
    """Whether `model`'s last layer can leave out tokens whose outputs nobody reads.

    Its forward then takes `read`, a `RowsRead`, and the last hidden states are those of its rows.
    """
    layers = _body(model).layers if hasattr(_body(model), "layers") else []
    return bool(layers) and is_fused(layers[-1]) and not torch.is_autocast_enabled("cpu")


def _agrees(layer: Any, model: Any) -> bool:
    """Whether the fused layer's output and gradient are the plain one's on a few random tokens."""
    weight = layer.input_layernorm.weight
    draw = torch.Generator().manual_seed(0)
    width = model.config.hidden_size
    hidden = torch.randn(1, _PROBE_TOKENS, width, generator=draw).to(weight.dtype)
    positions = torch.arange(3, 3 + _PROBE_TOKENS)[None]
    training = layer.training
    layer.eval()  # an adapter's dropout would differ from run to run
    parts = _parts([layer], layer)
    found: list[Tensor] = []
    try:
        with torch.enable_grad():
            for fused in (False, True):
                for part in parts if fused else []:
                    _fuse(part)
                x = hidden.clone().requires_grad_()
                rotary = _body(model).rotary_emb(x, positions)
                out = layer(
                    x, attention_mask=None, position_ids=positions, position_embeddings=rotary
                )
                out = out[0] if isinstance(out, tuple) else out
                (grad,) = torch.autograd.grad(out.float().square().sum(), x)
                found += [out.detach().float(), grad.float()]
    finally:
        for part in parts:
            if is_fused(part):
                _restore(part)
        layer.train(training)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 0.05
    pairs = zip(found[:2], found[2:], strict=True)
    return all((ours - theirs).norm() <= tolerance * theirs.norm() for theirs, ours in pairs)
