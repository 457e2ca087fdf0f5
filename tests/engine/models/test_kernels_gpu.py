"""Kernels on a GPU against torch's operations: layers, the head, and decode steps."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_engine import completions_batch, random_completions, tiny_model
from torch import Tensor

from engine.kernels import liger, triton_kernels
from engine.models.forward import token_outputs
from engine.models.fused import apply_fused
from engine.rollout.native import NativeEngine
from engine.rollout.native.decoding_weights import bind
from engine.rollout.native.llama_decoder import LlamaDecoder
from engine.rollout.protocol import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
FAMILIES = ["llama", "qwen2"]


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_entropy_and_gradients_are_those_without_kernels(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not liger.is_installed():
        pytest.skip("no liger_kernel")
    model = tiny_model(family).to("cuda", torch.float32)
    fused = copy.deepcopy(model)
    batch = completions_batch(*random_completions(6))

    def run(which: torch.nn.Module) -> list[Tensor]:
        out = token_outputs(which, batch, 0.7, entropy=True, entropy_gradient=True)
        assert out.entropy is not None
        (out.log_probs.sin().sum() + out.entropy.sum()).backward()
        return [out.log_probs, out.entropy, *(p.grad for p in which.parameters())]

    assert apply_fused(fused) or not liger.takes_device(torch.device("cuda"))
    found = run(fused)
    monkeypatch.setattr(triton_kernels, "takes", lambda tensor: False)
    for ours, theirs in zip(found, run(model), strict=True):
        assert distance(ours, theirs) < 1e-3


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_steps_logits_are_those_of_torchs_operations(family: str, n: int) -> None:
    weights = bind(tiny_model(family).to("cuda"))
    if not triton_kernels.takes(weights.embedding):
        pytest.skip("no compiler")
    found: dict[bool, list[Tensor]] = {True: [], False: []}
    for fuses, logits in found.items():
        with torch.inference_mode():
            one = LlamaDecoder(weights, 2, n, 5, 6)
            one._fuses = fuses
            prefilled = one.prefill([[5, 6, 7, 8, 9], [5, 6, 9]][: 3 - n])
            which = torch.tensor([0, 0] if n == 2 else [0, 1], device="cuda")
            slots = torch.arange(2, device="cuda")
            one.insert(prefilled, which, slots, slots[:0])
            for column in range(3):
                columns = torch.full((2,), column, device="cuda")
                tokens = torch.tensor([7 + column, 11], device="cuda")
                logits.append(one.decode(tokens, prefilled.lengths[which] + column, columns))
    for ours, theirs in zip(found[True], found[False], strict=True):
        assert distance(ours, theirs) < 1e-3


def test_graphs_outlive_a_cache_that_grows() -> None:
    model = tiny_model("qwen2").to("cuda", torch.bfloat16)
    model.config.max_position_embeddings = 512
    params = SamplingParams(n=2, max_new_tokens=160)
    prompts = [[5, 6, 7], [5, 9]]
    plain = NativeEngine(model).generate(prompts, params)
    graphed = NativeEngine(model, cuda_graphs=True).generate(prompts, params)
    assert [len(one.token_ids) for one in graphed] == [len(one.token_ids) for one in plain]
