"""The trainer's own parameters, looked up for decoding: no copies, checked to be a known shape.

Only a matrix with a LoRA adapter is computed, W + α/r · B·A, so that decoding costs what it costs
without; the result lives as long as the binding.

`bind` reads a transformers model of the Llama family (Llama, Mistral, Qwen2, Qwen3) into plain
tuples of its parameters. Anything it does not know exactly, it refuses with the reason; such a
model is decoded by `generic_decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from engine.rollout.linear import LinearFunction, linear_function
from engine.rollout.native.tensor_parallel import TensorParallel

_FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # frequencies that don't follow the length


class LinearWeights(NamedTuple):
    """A linear's parameters: weight `[out, in]`, bias `[out]` or None."""

    weight: Tensor
    bias: Tensor | None


class RMSNorm(NamedTuple):
    """An RMSNorm's weight `[size]` and epsilon."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    q: LinearWeights
    k: LinearWeights
    v: LinearWeights
    o: LinearWeights
    gate: LinearWeights
    up: LinearWeights
    down: LinearWeights
    input_norm: RMSNorm
    post_norm: RMSNorm
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """A Llama-shaped model: its parameters and the numbers its forward pass needs."""

    layers: tuple[LayerWeights, ...]
    embedding: Tensor  # [V, hidden]
    head: LinearWeights
    norm: RMSNorm
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float  # multiplies q·k
    activation: Callable[[Tensor], Tensor]
    rotary: nn.Module
    linear: LinearFunction
    tp: TensorParallel | None = None  # set: these are one rank's shards, and heads are its own


class UnsupportedModel(Exception):
    """The model differs from what `llama_decoder.py` computes; the message says where."""


def bind(model: Any) -> LlamaWeights:
    """Look up `model`'s parameters; raises UnsupportedModel if its forward pass is another."""
    if type(model) not in _FAMILIES:
        name = type(model).__name__
        raise UnsupportedModel(f"{name} is not a Llama, Mistral, Qwen2 or Qwen3 model")
    _refuse_variants(model)
    config, body = model.config, model.model
    if type(body.embed_tokens) is not nn.Embedding:
        raise UnsupportedModel(f"its embedding is a {type(body.embed_tokens).__name__}")
    attention = body.layers[0].self_attn
    head = _linear(model.lm_head)
    return LlamaWeights(
        layers=tuple(_layer(layer) for layer in body.layers),
        embedding=body.embed_tokens.weight,
        head=head,
        norm=_norm(body.norm),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        activation=_activation(body.layers[0].mlp.act_fn),
        rotary=body.rotary_emb,
        linear=linear_function(head.weight),
    )


def _refuse_variants(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for sliding windows, moving RoPE, hooks and sharded tensors."""
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    if any(windows) or (
        isinstance(model, MistralForCausalLM) and model.config.sliding_window is not None
    ):
        raise UnsupportedModel("it uses sliding-window attention")
    if model.model.rotary_emb.rope_type not in _STATIC_ROPE:
        raise UnsupportedModel(f"its RoPE type is {model.model.rotary_emb.rope_type!r}")
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise UnsupportedModel(f"its module {name!r} has forward hooks")
        for own, parameter in module._parameters.items():
            if parameter is not None and type(parameter.data) is not Tensor:
                kind = type(parameter.data).__name__
                raise UnsupportedModel(f"its parameter {f'{name}.{own}'!r} is a {kind}")


def _layer(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return LayerWeights(
        q=_linear(attention.q_proj),
        k=_linear(attention.k_proj),
        v=_linear(attention.v_proj),
        o=_linear(attention.o_proj),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        input_norm=_norm(layer.input_layernorm),
        post_norm=_norm(layer.post_attention_layernorm),
        q_norm=None if q_norm is None else _norm(q_norm),
        k_norm=None if k_norm is None else _norm(k_norm),
    )


def _linear(module: nn.Module) -> LinearWeights:
    if type(module) is nn.Linear:
        return LinearWeights(module.weight, module.bias)
    return _with_adapters(module)


def _with_adapters(module: nn.Module) -> LinearWeights:
    """A linear and its LoRA adapters as one; the same numbers but for rounding.

    A quantised matrix is made dense here, once a binding.
    """
    from peft.tuners.lora import Linear  # plain projections do without it

    if type(module) is not Linear:
        return _base(module)
    if module.merged or module.lora_variant or any(module.lora_bias.values()):
        raise UnsupportedModel("an adapter is not plain LoRA")
    weight, bias = _base(module.get_base_layer())
    if module.disable_adapters:
        return LinearWeights(weight, bias)
    with torch.no_grad():
        merged = weight.detach()
        for name in module.active_adapters:
            merged = merged + module.get_delta_weight(name)
        return LinearWeights(merged.to(weight.dtype), bias)


def _base(module: nn.Module) -> LinearWeights:
    """A linear below its adapters, or without any; a quantised one says what it computes with."""
    if type(module) is nn.Linear:
        return LinearWeights(module.weight, module.bias)
    dense = getattr(module, "dense", None)
    if not isinstance(module, nn.Linear) or dense is None:
        raise UnsupportedModel(f"a projection is a {type(module).__name__}, not a plain Linear")
    return LinearWeights(dense(), module.bias)


def _norm(module: Any) -> RMSNorm:
    return RMSNorm(module.weight, module.variance_epsilon)


def _activation(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return F.silu if type(module).__name__ in {"SiLUActivation", "SiLU"} else module
