"""LoRA and experts in vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any
from unittest import mock

import pytest
import torch
from rollout_models import CONTEXT, VOCABULARY, build, make_prompts, reference_log_probs, train
from server_process import vllm_url
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.config import LoRAConfig
from engine.errors import ConfigError, RolloutError
from engine.models import adapter_parameters, add_adapters
from engine.models.lora import merged_copy
from engine.models.quantize import quantize_linears
from engine.rollout import trainer_model
from engine.rollout.protocol import SamplingParams
from engine.rollout.server import ServerEngine
from engine.rollout.vllm import VllmEngine, weight_load
from engine.rollout.vllm.patches import apply_experts

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": CONTEXT, "kv_cache_memory_mb": 32}


def adapted(family: str = "qwen2", **settings: Any) -> Any:
    """A model with adapters that do something."""
    model: Any = build(family)
    kind = settings.pop("quantize", "")
    if kind:
        quantize_linears(model, kind)
    add_adapters(model, LoRAConfig(rank=4, alpha=8.0, **settings), seed=1)
    move(model, 1)
    return model


@torch.no_grad()
def move(model: Any, seed: int) -> None:
    """What stands for a step that trains adapters alone."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_parameters(model).values():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def error(engine: VllmEngine, model: Any, seed: int = 0) -> float:
    prompts = make_prompts(3, seed=seed)
    return max(
        float(
            reference_log_probs(model, prompts[c.prompt_index], c.token_ids)
            .sub(torch.tensor(c.log_probs))
            .abs()
            .max()
        )
        for c in engine.generate(prompts, SamplingParams(n=2, max_new_tokens=8, seed=seed))
    )


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("quantize", ["", "nf4", "int8"])
def test_merged_weights_are_those_of_the_saved_model(family: str, quantize: str) -> None:
    if family == "gpt2" and quantize:
        pytest.skip("its Conv1D is no linear module")
    model = adapted(family, quantize=quantize)
    expected = dict(merged_copy(model).named_parameters())
    merged = dict(trainer_model.merged_weights(model))
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, expected[name]), name
    changed = dict(trainer_model.merged_weights(model, changed_only=True))
    base = dict(trainer_model.base_weights(model))
    assert base.keys() == expected.keys()
    assert changed.keys() == {n for n in expected if not torch.equal(base[n], expected[n])}


def test_a_plain_model_is_its_own_parameters() -> None:
    model = build("qwen2")
    for name, tensor in trainer_model.merged_weights(model):
        assert tensor.data_ptr() == model.get_parameter(name).data_ptr()
    assert dict(trainer_model.merged_weights(model, changed_only=True)) == {}


@pytest.fixture(scope="module")
def merged_engine() -> Iterator[tuple[VllmEngine, Any]]:
    model = adapted(quantize="nf4")
    engine = VllmEngine(model, **OPTIONS)
    yield engine, model
    engine.close()


@needs_vllm
def test_adapters_are_merged_again_after_each_step(merged_engine: tuple[VllmEngine, Any]) -> None:
    engine, model = merged_engine
    for step in range(2):
        move(model, seed=step + 2)
        before = error(engine, model, seed=step)
        engine.update_weights(model, engine.policy_version + 1)
        assert before > 1e-2
        assert error(engine, model, seed=step) < 1e-4
    assert not engine.shares_storage


@needs_vllm
def test_a_base_that_was_thrown_away_comes_back(merged_engine: tuple[VllmEngine, Any]) -> None:
    """Of a known model only what adapters change is sent, but not after sleep of level 2."""
    engine, model = merged_engine
    engine.update_weights(model, engine.policy_version + 1)
    engine.sleep(2)
    engine.wake_weights()
    for tensor in engine.parameters().values():  # what a CUDA device would leave is not the weights
        tensor.fill_(float("nan"))
    engine.update_weights(model, engine.policy_version + 1)
    engine.wake_kv()
    assert error(engine, model) < 1e-4


@needs_vllm
def test_a_base_that_was_written_is_sent_again(merged_engine: tuple[VllmEngine, Any]) -> None:
    """By `load_state_dict`, into a model that the engine knows."""
    engine, model = merged_engine
    engine.update_weights(model, engine.policy_version + 1)
    state = {
        name: 1.1 * t if t.is_floating_point() else t for name, t in model.state_dict().items()
    }
    model.load_state_dict(state)
    assert error(engine, model) > 1e-2
    engine.update_weights(model, engine.policy_version + 1)
    assert error(engine, model) < 1e-4


@needs_vllm
def test_what_was_written_in_place_is_not_taken_for_the_model(
    merged_engine: tuple[VllmEngine, Any],
) -> None:
    engine, model = merged_engine
    engine.update_weights(model, engine.policy_version + 1)
    engine.begin_update(engine.policy_version + 1)
    for tensor in engine.parameters().values():
        tensor.mul_(1.5)
    engine.finish_update(engine.policy_version + 1)
    engine.update_weights(model, engine.policy_version + 1)
    assert error(engine, model) < 1e-4


@needs_vllm
def test_a_plain_model_may_follow_one_with_adapters(merged_engine: tuple[VllmEngine, Any]) -> None:
    engine, model = merged_engine
    plain = build("qwen2")
    engine.update_weights(plain, engine.policy_version + 1)
    assert engine.shares_storage
    assert error(engine, plain) < 1e-4
    engine.update_weights(model, engine.policy_version + 1)
    assert error(engine, model) < 1e-4
    assert not engine.shares_storage


@pytest.fixture(scope="module")
def adapter_engine() -> Iterator[tuple[VllmEngine, Any]]:
    model = adapted(target_modules=("q_proj", "down_proj"))
    engine = VllmEngine(model, lora="adapter", **OPTIONS)
    yield engine, model
    engine.close()


def base_storages(tensors: Iterable[tuple[str, Tensor]]) -> set[int]:
    return {t.untyped_storage().data_ptr() for name, t in tensors if ".lora_" not in name}


@needs_vllm
def test_vllms_own_lora_follows_the_adapters(adapter_engine: tuple[VllmEngine, Any]) -> None:
    """Its base is the trainer's storage, and no update loads it again."""
    engine, model = adapter_engine
    assert engine.shares_storage
    assert base_storages(model.named_parameters()) == base_storages(engine.parameters().items())
    assert error(engine, model) < 1e-4
    move(model, seed=5)
    assert error(engine, model) > 1e-2
    with mock.patch.object(weight_load.WeightLoad, "load") as load:
        engine.update_weights(model, engine.policy_version + 1)
        engine.sleep(2)
        engine.wake_weights()
        engine.update_weights(model, engine.policy_version + 1)
        engine.wake_kv()
    load.assert_not_called()
    assert error(engine, model) < 1e-4


@needs_vllm
def test_a_packed_base_is_loaded_once() -> None:
    """And dense: vLLM's is a second base, to which only adapters are sent."""
    model = adapted(quantize="nf4")
    engine = VllmEngine(model, lora="adapter", **OPTIONS)
    assert not engine.shares_storage
    move(model, seed=5)
    with mock.patch.object(weight_load.WeightLoad, "load") as load:
        engine.update_weights(model, 1)
    load.assert_not_called()
    assert error(engine, model) < 1e-4
    engine.close()


@needs_vllm
def test_the_trainer_goes_on_with_a_base_that_was_shared() -> None:
    model = adapted()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = VllmEngine(model, lora="adapter", **OPTIONS)
    shared = base_storages(model.named_parameters())
    engine.close()
    assert shared.isdisjoint(base_storages(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@needs_vllm
def test_the_order_of_the_vocabulary_comes_back_after_sleep() -> None:
    """Ranks that decode together have it on the device, where sleep of level 2 throws it away."""
    model = adapted("llama")
    engine = VllmEngine(model, lora="adapter", **OPTIONS)
    modules = engine._weights.target.modules()  # type: ignore[attr-defined]
    [layer] = [m for m in modules if hasattr(m, "reset_sharded_to_full_mapping")]
    layer.sharded_to_full_mapping = list(range(VOCABULARY))
    layer.sharded_to_full_mapping_gpu = torch.zeros(VOCABULARY, dtype=torch.long)
    assert error(engine, model) > 1e-2
    engine.update_weights(model, 1)
    assert error(engine, model) < 1e-4
    engine.close()


@needs_vllm
def test_vllms_own_lora_takes_no_stream_and_no_plain_model(
    adapter_engine: tuple[VllmEngine, Any],
) -> None:
    engine, model = adapter_engine
    with pytest.raises(RolloutError, match="takes a model, not a stream"):
        engine.update_from(iter(()), engine.policy_version + 1)
    with pytest.raises(RolloutError, match="has no adapters"):
        engine.update_weights(build("qwen2"), engine.policy_version + 1)
    with pytest.raises(RolloutError, match="can't serve"):
        error(engine, model)
    engine.update_weights(model, engine.policy_version + 1)
    assert error(engine, model) < 1e-4


@needs_vllm
def test_modules_that_vllm_cannot_adapt_are_named(adapter_engine: tuple[VllmEngine, Any]) -> None:
    engine, model = adapter_engine
    stranger = adapted()
    config = stranger.peft_config["default"]
    config.use_dora = True
    with pytest.raises(RolloutError, match=r"can't take the adapter.*lora=merged"):
        engine.update_weights(stranger, engine.policy_version + 1)
    engine.update_weights(model, engine.policy_version + 1)
    assert error(engine, model) < 1e-4


def test_unknown_ways_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.lora='both' is unknown"):
        VllmEngine(adapted(), lora="both")


@needs_vllm
@pytest.mark.slow
def test_adapters_reach_tensor_parallel_workers() -> None:
    model = adapted("llama", target_modules=("q_proj", "v_proj", "down_proj"))
    engine = VllmEngine(model, lora="adapter", tensor_parallel_size=2, bucket_mb=1, **OPTIONS)
    try:
        assert error(engine, model) < 1e-4
        move(model, seed=6)
        engine.update_weights(model, 1)
        assert error(engine, model) < 1e-4
    finally:
        engine.close()


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
