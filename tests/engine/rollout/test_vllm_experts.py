"""Mixtures of experts on vLLM's CPU engine: no packed experts, which updates would not reach."""

from __future__ import annotations

import importlib.util
from enum import Enum
from typing import Any

import pytest
import torch
from rollout_models import CONTEXT, VOCABULARY, build, make_prompts, reference_log_probs, train
from server_process import vllm_url
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.errors import RolloutError
from engine.rollout.protocol import SamplingParams
from engine.rollout.server import ServerEngine
from engine.rollout.vllm import VllmEngine
from engine.rollout.vllm.patches import apply_experts

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,  # not a multiple of 32, to which vLLM's kernel pads
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class Activation(Enum):
    SILU = "silu"
    RELU = "relu2_no_mul"


def mixture(family: str) -> Any:
    torch.manual_seed(7)
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=6)).eval()
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE)).eval()


@pytest.mark.parametrize("mapped", [False, True])
@torch.no_grad()
def test_experts_are_those_of_transformers(mapped: bool) -> None:
    """Also those of a rank that has some of them: the others' tokens get nothing here."""
    torch.manual_seed(0)
    experts = Qwen3MoeExperts(Qwen3MoeConfig(**SHAPE))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    states, output = torch.randn(9, 128), torch.full((9, 128), torch.nan)
    weights, ids = torch.rand(9, 6).topk(2)
    number = torch.tensor([-1, 0, 1, 2, -1, 3]) if mapped else None
    kept = [1, 2, 3, 5] if mapped else list(range(6))
    apply_experts(
        (None, None),
        output,
        states,
        experts.gate_up_proj[kept],
        experts.down_proj[kept],
        weights,
        ids,
        Activation.SILU,
        expert_map=number,
        apply_router_weight_on_input=False,
        a1q_scale=None,
    )
    here = torch.isin(ids, torch.tensor(kept))
    expected = experts(states, ids, weights * here)
    assert torch.allclose(output, expected, atol=1e-5)


def test_an_activation_that_is_not_known() -> None:
    empty = torch.empty(0)
    with pytest.raises(RolloutError, match=r"activation relu2_no_mul can't be .*engine=native"):
        apply_experts(
            (None, None),
            *(empty,) * 6,
            Activation.RELU,
            expert_map=None,
            apply_router_weight_on_input=False,
        )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("family", "in_process"), [("qwen3_moe", True), ("qwen3_moe", False), ("mixtral", True)]
)
def test_updates_reach_the_experts(family: str, in_process: bool) -> None:
    model = mixture(family)
    engine = VllmEngine(
        model, max_num_seqs=8, max_model_len=64, kv_cache_memory_mb=32, in_process=in_process
    )
    prompts, params = make_prompts(4, seed=2), SamplingParams(n=2, max_new_tokens=12, seed=3)
    try:
        for version in (1, 2):
            for c in engine.generate(prompts, params):
                expected = reference_log_probs(model, prompts[c.prompt_index], c.token_ids)
                assert (expected - torch.tensor(c.log_probs)).abs().max() < 1e-4
            before = [p.detach().clone() for n, p in model.named_parameters() if "experts" in n]
            train(model, steps=2)
            after = [p for n, p in model.named_parameters() if "experts" in n]
            assert all((a - b).abs().max() > 1e-3 for a, b in zip(after, before, strict=True))
            engine.update_weights(model, version)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_experts_start_beside_a_model_without() -> None:
    dense, experts = build("qwen2"), mixture("qwen3_moe")
    prompts, params = make_prompts(4, seed=2), SamplingParams(max_new_tokens=12, seed=3)
    engines: list[VllmEngine] = []
    try:
        for model in (dense, experts):
            engines.append(
                VllmEngine(model, max_num_seqs=8, max_model_len=64, kv_cache_memory_mb=32)
            )
        for model, engine in zip((dense, experts), engines, strict=True):
            for c in engine.generate(prompts, params):
                expected = reference_log_probs(model, prompts[c.prompt_index], c.token_ids)
                assert (expected - torch.tensor(c.log_probs)).abs().max() < 1e-4
    finally:
        for engine in engines:
            engine.close()


def served_mixture() -> Any:
    return mixture("qwen3_moe")


@pytest.mark.slow
def test_a_server_of_experts_takes_updates() -> None:
    """vLLM's own server packs experts; its reload packs them again."""
    url, model = vllm_url(served_mixture), mixture("qwen3_moe")
    engine = ServerEngine(model, url=url)
    prompts, params = make_prompts(4, seed=2), SamplingParams(n=2, max_new_tokens=12, seed=3)
    for version in (1, 2):
        train(model, steps=2)
        engine.update_weights(model, version)
        for c in engine.generate(prompts, params):
            expected = reference_log_probs(model, prompts[c.prompt_index], c.token_ids)
            assert (expected - torch.tensor(c.log_probs)).abs().max() < 1e-3
    engine.close()
