"""The Llama family's training forward with fewer passes over memory, on the model's own parameters.

`apply_fused` gives norms, rotary positions, attention, MLP and the layers of one model instance the
forwards below on the CPU, and those of `engine.kernels.liger` on CUDA, where Liger-Kernel is
installed. They compute the same, with a backward pass that stores less: see
`engine.kernels.decoder_layer`. What attends (SDPA, packed rows, Ulysses) stays the module's choice.
"""

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.kernels import decoder_layer, liger, training_ops
from engine.kernels.training_ops import Rotary, RowsRead
from engine.models.packed_attention import Segments
from engine.models.packing import attends_packed, body_of

_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # frequencies that don't follow the length
_MIN_TOKENS_A_POSITION = 4  # from which on each position's rotary numbers are computed once


class FusedForward:
    """A forward method that takes the place of a module's own, `plain`, where it can."""

    def __init__(self, module: nn.Module, run: Callable[..., object]) -> None:
        self.plain, self._module, self._run = module.forward, module, run

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.is_autocast_enabled("cpu"):  # it chooses dtypes by operation
            return self.plain(*args, **kwargs)
        return self._run(self._module, self.plain, *args, **kwargs)


def is_fused(module: nn.Module) -> bool:
    """Tell whether `apply_fused` has put a forward in place of the module's own."""
    return isinstance(module.__dict__.get("forward"), FusedForward)


def layer_forward(
    module: Any,
    plain: Callable[..., Tensor],
    hidden_states: Tensor,
    *args: object,
    read: RowsRead | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute outputs [B, T, H]; in the last layer with `read` those [1, N, H] of packed rows."""
    attention, norms = module.self_attn, (module.input_layernorm, module.post_attention_layernorm)
    if attention.layer_idx < attention.config.num_hidden_layers - 1:
        read = None
    if not args and (out := _as_one(module, hidden_states, read, **kwargs)) is not None:
        return out
    if args or any(map(_has_hooks, norms)):
        out = plain(hidden_states, *args, **kwargs)
        return out if read is None else read.of(out)
    residual, normed = decoder_layer.add_norm(hidden_states, None, norms[0])
    attended, _ = attention(hidden_states=normed, read=read, **kwargs)
    residual = residual if read is None else read.of(residual)
    residual, normed = decoder_layer.add_norm(residual, attended, norms[1])
    mlp = module.mlp
    if _has_hooks(mlp):
        return residual + mlp(normed)
    return mlp(normed, residual=residual)


def _as_one(
    module: Any,
    x: Tensor,
    read: RowsRead | None,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    segments: Segments | None = None,
    past_key_values: object = None,
    **options: object,
) -> Tensor | None:
    """Run the layer as one function, of packed rows; None where it is computed in parts."""
    attention, mlp = module.self_attn, module.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    linear = [*projections, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = module.input_layernorm, module.post_attention_layernorm
    parts = attention, mlp, *norms
    if (
        segments is None
        or past_key_values is not None
        or hasattr(attention, "q_norm")
        or (attention.training and attention.attention_dropout)
        or any(map(_has_hooks, parts))
        or not all(map(is_fused, parts))
        or not (attends_packed(attention) and all(map(_is_plain, linear)))
        or any(matrix.bias is not None for matrix in linear[4:])
    ):
        return None
    cos, sin = (each.unsqueeze(2) for each in position_embeddings)
    weights = decoder_layer.LayerWeights(
        (norms[0].weight, norms[1].weight),
        tuple(each.weight for each in projections),
        tuple(each.bias for each in projections),
        attention.o_proj.weight,
        attention.o_proj.bias,
        tuple(each.weight for each in linear[4:]),
    )
    call = decoder_layer.LayerCall(
        Rotary(cos, sin, 2),
        segments.runs,
        attention.scaling,
        (norms[0].variance_epsilon, norms[1].variance_epsilon),
        read,
        torch.is_grad_enabled(),
    )
    takes = decoder_layer.takes_layer(x, weights, call)
    return decoder_layer.compiled_layer(x, weights, call) if takes else None


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def rotary_forward(
    module: nn.Module, plain: Callable[..., Any], x: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute each position's rotary numbers once, where many tokens are at few positions."""
    last = int(position_ids.max()) + 1
    if module.rope_type not in _STATIC_ROPE or _MIN_TOKENS_A_POSITION * last > position_ids.numel():
        return plain(x, position_ids)
    cos, sin = plain(x, torch.arange(last, device=position_ids.device)[None])
    flat, shape = position_ids.flatten(), (*position_ids.shape, cos.shape[-1])
    return tuple(each[0].index_select(0, flat).view(shape) for each in (cos, sin))


def norm_forward(
    module: Any,
    plain: Callable[..., Tensor],
    hidden_states: Tensor,
    norm: Callable[[Tensor, Tensor, float], Tensor] = decoder_layer.rms_norm,
) -> Tensor:
    if hidden_states.dtype != module.weight.dtype:
        return plain(hidden_states)
    return norm(hidden_states, module.weight, module.variance_epsilon)


def mlp_forward(
    module: Any, plain: Callable[..., Tensor], x: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Compute what the module's own forward does, plus `residual` where it is given."""
    matrices = [module.gate_proj, module.up_proj, module.down_proj]
    if all(_is_plain(linear) and linear.bias is None for linear in matrices):
        gate, up, down = (linear.weight for linear in matrices)
        return decoder_layer.gated_mlp(x, gate, up, down, residual)
    gate, up = _project(x, matrices[:2])
    out = module.down_proj(decoder_layer.silu_product(gate, up))
    return out if residual is None else residual + out


def attention_forward(
    module: Any,
    plain: Callable[..., tuple[Tensor, Tensor | None]],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: object = None,
    read: RowsRead | None = None,
    *,
    by_liger: bool = False,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Compute the module's attention for the rows of `read`; with a cache its own forward runs."""
    cos, sin = position_embeddings
    if past_key_values is not None or cos.shape[-1] != module.head_dim:
        out, weights = plain(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        return (out if read is None else read.of(out)), weights
    window = getattr(module.config, "sliding_window", None)
    make = liger.queries_keys_values if by_liger else _queries_keys_values
    query, key, value = make(module, hidden_states, cos, sin)
    attend: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
        module.config._attn_implementation,
        sys.modules[type(module).__module__].eager_attention_forward,
    )
    out, weights = attend(
        module,
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attention_mask,
        dropout=module.attention_dropout if module.training else 0.0,
        scaling=module.scaling,
        sliding_window=getattr(module, "sliding_window", window),
        **kwargs,
    )
    out = out.reshape(*hidden_states.shape[:-1], -1)
    if by_liger:
        return module.o_proj(out.contiguous()), weights
    (out,) = _project(out if read is None else read.of(out), [module.o_proj])
    return out, weights


def _queries_keys_values(module: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values [B, L, heads, d], rotated where they are to be."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [B, L, 1, d]
    projections = [module.q_proj, module.k_proj, module.v_proj]
    norms = hasattr(module, "q_norm")
    if not norms and all(map(_is_plain, projections)):
        return decoder_layer.rotated_linears(
            x, [(each.weight, each.bias) for each in projections], cos, sin
        )
    query, key, value = (
        out.view(*x.shape[:-1], -1, module.head_dim) for out in _project(x, projections)
    )
    if norms:
        query, key = module.q_norm(query), module.k_norm(key)
    return decoder_layer.rotate(query, cos, sin), decoder_layer.rotate(key, cos, sin), value


def _project(x: Tensor, modules: list[Any]) -> tuple[Tensor, ...]:
    """Apply linear layers that share `x`; adapted and quantised ones run by themselves."""
    if all(_is_plain(linear) for linear in modules):
        return decoder_layer.linears(x, [(linear.weight, linear.bias) for linear in modules])
    return tuple(linear(x) for linear in modules)


def _is_plain(linear: nn.Module) -> bool:
    return (
        type(linear) is nn.Linear
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
        and not is_sharded(linear.weight)
    )


def is_sharded(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) or isinstance(parameter.data, DTensor)


log = logging.getLogger(__name__)

_FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
_PROBE_TOKENS = 5


def apply_fused(model: Any, device: torch.device | None = None) -> bool:
    """Give `model`, a language model, a critic or a stage of one, fused forwards in place.

    Returns whether it has them. `device`: where it will compute; None: where it is. Left as it is:
    a model of another family, on a device that has none, sharded (on the CPU), or whose first
    layer, once loaded, computes something else than transformers' when it is tried here.
    """
    device = device or next(model.parameters()).device
    layers = _layers(model, device)
    if not layers or is_fused(layers[0].mlp):
        return bool(layers)
    loaded = all(p.device == device and not is_sharded(p) for p in layers[0].parameters())
    if loaded and not _agrees(layers[0], model):
        log.warning(
            "the fused forward of %s gives other numbers than transformers'; it is left out",
            model.config.model_type,
        )
        return False
    for module in _parts(layers, body_of(model)):
        _fuse(module, device)
    return True


def gains_by_fusion(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether weights of `dtype` are trained in less time on `device`."""
    if device.type != "cpu":
        return liger.takes_device(device) and dtype != torch.float64
    compiled = dtype == torch.bfloat16 and training_ops.library() is not None
    return compiled or dtype == torch.float32


def _layers(model: nn.Module, device: torch.device) -> list[Any]:
    """Return the decoder layers that can have fused forwards; none of a model that can't."""
    if getattr(getattr(model, "config", None), "model_type", None) not in _FAMILIES:
        return []
    body = body_of(model)
    if device.type == "cpu":
        if not all(p.device.type == "cpu" and not is_sharded(p) for p in body.parameters()):
            return []
    elif not liger.takes_device(device):
        return []
    layers = list(body.layers)
    return layers if all(_is_gated(layer.mlp) for layer in layers) else []


def _parts(layers: list[Any], body: nn.Module) -> list[nn.Module]:
    """Return norms, rotary positions, attentions, MLPs and the layers themselves."""
    suffixes = ("RMSNorm", "RotaryEmbedding")
    norms = [m for m in body.modules() if type(m).__name__.endswith(suffixes)]
    return [*norms, *(part for layer in layers for part in (layer.self_attn, layer.mlp, layer))]


def _fuse(module: nn.Module, device: torch.device) -> None:
    """Replace a module's forward; on CUDA layers and rotary positions keep transformers'."""
    forwards: tuple[Callable[..., object], Callable[..., object] | None]
    name = type(module).__name__
    if name.endswith("RMSNorm"):
        forwards = norm_forward, partial(norm_forward, norm=liger.rms_norm)
    elif name.endswith("RotaryEmbedding"):
        forwards = rotary_forward, None
    elif hasattr(module, "self_attn"):
        forwards = layer_forward, None
    elif hasattr(module, "gate_proj"):
        forwards = mlp_forward, liger.mlp_forward
    else:
        forwards = attention_forward, partial(attention_forward, by_liger=True)
    forward = forwards[device.type != "cpu"]
    if forward is not None:
        module.forward = FusedForward(module, forward)


def _is_gated(mlp: nn.Module) -> bool:
    names = ("gate_proj", "up_proj", "down_proj")
    silu = type(getattr(mlp, "act_fn", None)).__name__ in ("SiLUActivation", "SiLU")
    return silu and all(hasattr(mlp, name) for name in names)


def takes_rows_read(model: nn.Module) -> bool:
    """Tell whether the last layer of `model` takes `read`, to leave out rows that nobody reads."""
    layers = body_of(model).layers if hasattr(body_of(model), "layers") else []
    return bool(layers) and is_fused(layers[-1]) and not torch.is_autocast_enabled("cpu")


def _agrees(layer: Any, model: Any) -> bool:
    """Compare the fused layer's output and gradient with the plain one's on random tokens."""
    weight = layer.input_layernorm.weight
    draw = torch.Generator().manual_seed(0)
    width, device = model.config.hidden_size, weight.device
    hidden = torch.randn(1, _PROBE_TOKENS, width, generator=draw).to(device, weight.dtype)
    positions = torch.arange(3, 3 + _PROBE_TOKENS, device=device)[None]
    training = layer.training
    layer.eval()  # an adapter's dropout would differ from run to run
    parts = _parts([layer], layer)
    results: list[Tensor] = []
    try:
        with torch.enable_grad():
            for fused in (False, True):
                for part in parts if fused else []:
                    _fuse(part, device)
                x = hidden.clone().requires_grad_()
                rotary = body_of(model).rotary_emb(x, positions)
                out = layer(
                    x, attention_mask=None, position_ids=positions, position_embeddings=rotary
                )
                out = out[0] if isinstance(out, tuple) else out
                (grad,) = torch.autograd.grad(out.float().square().sum(), x)
                results += [out.detach().float(), grad.float()]
    finally:
        for part in parts:
            if is_fused(part):
                del part.__dict__["forward"]
        layer.train(training)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 0.05
    pairs = zip(results[:2], results[2:], strict=True)
    return all((fused - plain).norm() <= tolerance * plain.norm() for plain, fused in pairs)
