"""A layer as one autograd function gives the numbers of its parts, and leaves others to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_engine import VOCABULARY, shared_prompts_batch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from engine.config import LoRAConfig
from engine.kernels import decoder_layer, training_ops
from engine.models import add_adapters, fused
from engine.models.forward import token_outputs
from engine.models.fused import apply_fused
from engine.models.packing import apply_packing
from engine.runtime.optimizer import accumulate_in_float32

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(training_ops.library() is None, reason="no AVX512-BF16, or no C compiler"),
]
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def packed_model(family: str = "qwen2") -> Any:
    torch.manual_seed(0)
    model: Any = (
        Qwen2ForCausalLM(Qwen2Config(**SHAPE))
        if family == "qwen2"
        else LlamaForCausalLM(LlamaConfig(**SHAPE))
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model = model.bfloat16()
    accumulate_in_float32(model, list(model.parameters()))
    apply_packing(model)
    assert apply_fused(model)
    return model


def found(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Tensor]]:
    """How many layers were one function; log-probs and gradients."""
    layers: list[Tensor] = []
    plain: Callable[..., Tensor] = decoder_layer.compiled_layer

    def counted(*args: Any) -> Tensor:
        layers.append(plain(*args))
        return layers[-1]

    model.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(fused, "compiled_layer", counted)
        log_probs = token_outputs(model, shared_prompts_batch(), 1.0).log_probs
    weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    (log_probs * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return len(layers), {"log_probs": log_probs.detach()} | gradients


def in_parts(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(fused, "takes_layer", lambda *args: False)
        layers, values = found(model, patch)
    assert not layers
    return values


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_layer_is_its_parts(family: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one, of the tokens that are read, as well."""
    torch.set_num_threads(threads)
    model = packed_model(family)
    layers, got = found(model, monkeypatch)
    assert layers == 2
    assert_same(got, in_parts(model, monkeypatch))


@pytest.mark.parametrize("trained", ["k_proj", "layers.1.mlp", "layers.0.input_layernorm"])
def test_frozen_weights_have_no_gradient(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    layers, got = found(model, monkeypatch)
    assert layers == 2
    assert {trained in name for name in got if name != "log_probs"} == {True}
    assert_same(got, in_parts(model, monkeypatch))


def test_other_layers_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a hook inside; with adapters; in float32."""
    model = packed_model()
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *args: None)
    assert found(model, monkeypatch)[0] == 1
    handle.remove()
    add_adapters(model, LoRAConfig(rank=2), 0)
    assert found(model, monkeypatch)[0] == 0
    assert found(packed_model().float(), monkeypatch)[0] == 0
