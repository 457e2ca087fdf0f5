"""Fused forwards compute what transformers' modules do, gradients too, and go as they came."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_engine import (
    VOCABULARY,
    completions_batch,
    random_completions,
    shared_prompts_batch,
    tiny_model,
)
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.batch import Batch
from engine.config import LoRAConfig
from engine.kernels import decoder_layer
from engine.kernels.decoder_layer import gated_mlp, linears, rms_norm, rotate, silu_product
from engine.kernels.training_ops import recurring_size
from engine.models import add_adapters
from engine.models.forward import token_outputs
from engine.models.fused import apply_fused, rotary_forward
from engine.models.packing import apply_packing

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ["llama", "qwen2", "qwen3"]


def model_of(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    if family != "qwen3":
        return tiny_model(family).to(dtype)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=True,
        initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(shape).to(dtype)


def outputs_and_gradients(model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
    """Log-probs, entropy and the gradient of every trained weight."""
    out = token_outputs(model, batch, 1.0, entropy=True)
    assert out.entropy is not None
    model.zero_grad()
    (
        out.log_probs * torch.linspace(-1, 1, out.log_probs.numel()).view_as(out.log_probs)
    ).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"log_probs": out.log_probs.detach(), "entropy": out.entropy.detach()} | grads


def _note(calls: list[str], name: str, function: Any, *args: Any) -> Any:
    calls.append(name)
    return function(*args)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the fused functions that run."""
    calls: list[str] = []
    names = ("_RMSNorm", "_Rotate", "_Linears", "_SiluProduct", "_GatedMLP")
    with monkeypatch.context() as patch:
        for name in names:
            function = getattr(decoder_layer, name)

            def watched(
                ctx: Any, *args: Any, name: str = name, plain: Any = function.forward
            ) -> Any:
                calls.append(name)
                return plain(ctx, *args)

            patch.setattr(function, "forward", staticmethod(watched))
        yield calls


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_transformers_own(
    family: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = model_of(family), completions_batch(*random_completions(6))
    if packed:
        apply_packing(model)
    wanted = outputs_and_gradients(model, batch)
    assert apply_fused(model)
    with counted(monkeypatch) as calls:
        got = outputs_and_gradients(model, batch)
    assert {"_RMSNorm", "_Rotate", "_Linears", "_GatedMLP"} == set(calls)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, atol=3e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers(family: str, packed: bool) -> None:
    batch = shared_prompts_batch()
    model = model_of(family, torch.bfloat16)
    exact = outputs_and_gradients(copy.deepcopy(model).float(), batch)
    plain = outputs_and_gradients(model, batch)
    if packed:
        apply_packing(model)
    assert apply_fused(model)
    got = outputs_and_gradients(model, batch)
    for name, true in exact.items():
        error = (plain[name].float() - true).norm()
        assert (got[name].float() - true).norm() <= 1.3 * error + 0.02 * true.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_layer_leaves_out_tokens_that_nobody_reads(dtype: torch.dtype) -> None:
    """A prompt's end that several completions follow is computed once, and its gradients add up."""
    model, batch = model_of("qwen2", dtype), shared_prompts_batch()
    apply_packing(model)
    assert apply_fused(model)
    body: Any = model.base_model
    sizes: list[int] = []
    norm = body.norm.register_forward_hook(lambda module, args, out: sizes.append(out.shape[1]))
    got = outputs_and_gradients(model, batch)
    norm.remove()
    shared = (
        2 + 2 + 1
    )  # prompts' ends that are read again: of 4 (one has no response), 3 and 2 rows
    assert sizes == [recurring_size(int(batch["response_mask"].sum()) - shared)]
    wanted = outputs_and_gradients(model_of("qwen2", dtype), batch)
    tolerance = (
        {"atol": 3e-5, "rtol": 1e-3} if dtype == torch.float32 else {"atol": 0.2, "rtol": 0.1}
    )
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, **tolerance, msg=name)


def test_adapters_run_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = completions_batch(*random_completions(6))
    model = model_of("llama")
    add_adapters(model, LoRAConfig(rank=2), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1), std=0.1)
    wanted = outputs_and_gradients(model, batch)
    assert apply_fused(model)
    with counted(monkeypatch) as calls:
        got = outputs_and_gradients(model, batch)
    assert set(calls) == {"_RMSNorm", "_Rotate", "_SiluProduct"}
    assert got.keys() == wanted.keys()
    assert all(".lora_" in name for name in got if name not in ("log_probs", "entropy"))
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, atol=3e-5, rtol=1e-3, msg=name)


def test_decoding_with_a_cache_is_unchanged() -> None:
    model, prompt = model_of("qwen2"), torch.tensor([[3, 5, 7, 9]])
    wanted: Any = model.generate(prompt, max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    assert apply_fused(model)
    got: Any = model.generate(prompt, max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    assert got.tolist() == wanted.tolist()


def test_a_copy_has_forwards_of_its_own() -> None:
    model, batch = model_of("qwen2"), completions_batch(*random_completions(4))
    assert apply_fused(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert outputs_and_gradients(twin, batch)["log_probs"].std() > 0.01


def test_a_model_that_computes_something_else_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    odd = model_of("llama")
    norm: Any = odd.model.layers[0].input_layernorm
    plain = norm.forward
    norm.forward = lambda hidden: 1.5 * plain(hidden)
    assert not apply_fused(odd)
    assert "other numbers than transformers'" in caplog.text
    assert not apply_fused(tiny_model("gpt2")), "another family"


@pytest.mark.parametrize("chunk", [1, 1 << 18])
def test_written_gradients_are_those_of_finite_differences(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_layer, "_CHUNK_ELEMENTS", chunk)
    draw = torch.Generator().manual_seed(2)

    def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [
            torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes
        ]

    x, gate, up, down = tensors((2, 3, 4), (6, 4), (6, 4), (4, 6))
    check = torch.autograd.gradcheck
    assert check(gated_mlp, (x, gate, up, down))
    assert check(lambda a, w, b, v: linears(a, [(w, b), (v, None)]), (x, gate, *tensors((6,)), up))
    assert check(silu_product, tuple(tensors((2, 5), (2, 5))))
    q, *turns = tensors((2, 3, 2, 4), (2, 3, 1, 4), (2, 3, 1, 4))
    cos, sin = (t.detach() for t in turns)
    assert check(lambda t: rotate(t, cos, sin), (q,))
    weight = tensors((4,))[0]
    assert check(lambda t, w: rms_norm(t, w, 1e-3), (x, weight))


@pytest.mark.parametrize(
    ("rope", "once"),
    [
        ({"rope_type": "default"}, True),
        ({"rope_type": "linear", "factor": 2.0}, True),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}, True),
        ({"rope_type": "dynamic", "factor": 2.0}, False),  # follows the longest row of each call
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_position_s_rotary_numbers_are_computed_once(
    rope: dict[str, Any], once: bool, dtype: torch.dtype
) -> None:
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=16,
        rope_parameters={"rope_theta": 10000.0} | rope,
    )  # fmt: skip
    module, x = LlamaRotaryEmbedding(config), torch.zeros(1, dtype=dtype)
    computed: list[int] = []

    def plain(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        computed.append(position_ids.numel())
        return LlamaRotaryEmbedding(config)(x, position_ids)

    positions = torch.randint(0, 24, (2, 100))
    got, wanted = rotary_forward(module, plain, x, positions), module(x, positions)
    assert torch.equal(torch.stack(got), torch.stack(wanted))
    assert computed == [int(positions.max()) + 1 if once else 200]
    rotary_forward(module, plain, x, positions[:, :10])
    assert computed[-1] == 20
