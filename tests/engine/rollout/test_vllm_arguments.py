"""What of vLLM's own a run may tune: the arguments that reach it, and those that can't."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from rollout_models import build, make_prompts, reference_log_probs, train
from test_vllm_options import DEFAULTS

from engine.config import RolloutConfig
from engine.errors import ConfigError, RolloutError
from engine.rollout.protocol import SamplingParams, check_engine_settings
from engine.rollout.vllm import VllmEngine, options
from engine.rollout.vllm.options import argument_names, engine_arguments
from engine.rollout.vllm.weight_load import QuantizedLoad

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 64, "kv_cache_memory_mb": 32}


def arguments(on_gpu: bool, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, Any]:
    monkeypatch.setattr(options, "on_gpu", lambda: on_gpu)
    given = DEFAULTS | {"kv_cache_memory_mb": None} | changes
    return engine_arguments(options.resolve(build("qwen2"), **given))


def test_on_a_gpu_vllm_does_what_its_users_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    found = arguments(True, monkeypatch)
    assert found["gpu_memory_utilization"] == 0.5
    assert "kv_cache_memory_bytes" not in found
    assert found["enforce_eager"] is False
    assert found["enable_chunked_prefill"] is True
    assert found["enable_prefix_caching"] is True
    assert found["max_num_batched_tokens"] is None
    assert "block_size" not in found
    tuning = dict[str, Any](
        gpu_memory_utilization=0.8,
        enforce_eager=True,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        quantization="fp8",
        engine_kwargs={"kv_cache_dtype": "fp8", "async_scheduling": None},
    )
    found = arguments(True, monkeypatch, dtype="bfloat16", **tuning)
    assert found["gpu_memory_utilization"] == 0.8
    assert found["enforce_eager"] is True
    assert found["enable_chunked_prefill"] is False
    assert found["enable_prefix_caching"] is False
    assert found["max_num_batched_tokens"] == 8192  # a whole prompt's, at least
    assert found["quantization"] == "fp8_per_block"
    assert found["kv_cache_dtype"] == "fp8"
    assert "async_scheduling" not in found


def test_a_fixed_cache_is_for_the_whole_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = arguments(True, monkeypatch, kv_cache_memory_mb=64, tensor_parallel_size=2)
    assert found["kv_cache_memory_bytes"] == 32 << 20
    assert arguments(False, monkeypatch)["kv_cache_memory_bytes"] == 256 << 20


def test_a_drafts_weights_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = {"model": "/models/draft", "method": "eagle3", "num_speculative_tokens": 3}
    found = arguments(True, monkeypatch, engine_kwargs={"speculative_config": draft})
    assert found["load_format"] == "dummy"
    assert found["speculative_config"] == draft | {"draft_load_config": {"load_format": "auto"}}
    assert found["sleep_preserve_parameter_names"] == ["draft.*"]


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (
            {"engine_kwargs": {"dtype": "half"}},
            "it is a setting of its own; set rollout.vllm.d",
        ),
        (
            {"engine_kwargs": {"seed": 1}},
            "kwargs.seed=1: it is a setting of its own; set seed",
        ),
        (
            {"engine_kwargs": {"load_format": "auto"}},
            "load_format='auto': it is given by the run",
        ),
        (
            {"engine_kwargs": {"cpu_offload_gb": 4}},
            "cpu_offload_gb=4: weights that vLLM keeps on t",
        ),
        ({"engine_kwargs": {"pipeline_parallel_size": 2}}, "each vLLM engine is one replica"),
        ({"engine_kwargs": {"enable_expert_parallel": True}}, "set rollout.vllm.in_process=false"),
        ({"engine_kwargs": {"speculative_config": 3}}, "must be a mapping, such as"),
        (
            {"engine_kwargs": {"speculative_config": {"method": "mtp"}}},
            "method='mtp' drafts with layers of the policy's own folder, .* use one of ngram",
        ),
        (
            {"engine_kwargs": {"speculative_config": {"method": "dspark", "model": "d"}}},
            "method='dspark' can't be used with updated weights",
        ),
        ({"quantization": "fp8", "lora": "adapter"}, "quantised with the adapters merged into the"),
    ],
)
def test_what_cannot_go_is_refused_by_name(tuning: dict[str, Any], message: str) -> None:
    config = RolloutConfig.model_validate({"engine": "vllm", "vllm": tuning})
    with pytest.raises(ConfigError, match=message):
        check_engine_settings(config)


def test_two_sizes_of_one_cache_contradict() -> None:
    config = {"engine": "vllm", "kv_cache_memory_mb": 64, "vllm": {"gpu_memory_utilization": 0.7}}
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0.7 has no effect beside .*=64"):
        check_engine_settings(RolloutConfig.model_validate(config))


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        ({"enable_chunked_prefill": True}, "enable_chunked_prefill=true on a CPU"),
        ({"quantization": "fp8"}, "quantization=fp8 on a CPU: vLLM quantises on GPUs"),
        ({"max_num_batched_tokens": 100}, r"=100 is less than a prompt and .*\(128 tokens\)"),
    ],
)
def test_what_cannot_be_on_this_machine(tuning: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.resolve(build("qwen2"), **(DEFAULTS | tuning))


def test_a_pass_has_room_for_a_token_of_each_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"=64 is less than rollout.max_num_seqs=128"):
        arguments(True, monkeypatch, max_num_seqs=128, max_num_batched_tokens=64)


def test_float32_weights_are_not_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"=fp8 of float32 weights.*rollout.vllm.dtype=bfloat16"):
        arguments(True, monkeypatch, quantization="fp8")


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'gpu_memory'"):
        options.resolve(build("qwen2"), gpu_memory=0.5)


@needs_vllm
def test_names_are_those_of_the_installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    names = {field.name for field in dataclasses.fields(vllm.EngineArgs)}
    assert argument_names() == names
    assert set(options._REFUSED) <= names, "a refusal of what no longer exists"
    assert set(arguments(True, monkeypatch)) | set(arguments(False, monkeypatch)) <= names
    config = {"engine": "vllm", "vllm": {"engine_kwargs": {"block_sise": 32}}}
    with pytest.raises(ConfigError, match=r"block_sise: .*no such argument; did you mean block_s"):
        check_engine_settings(RolloutConfig.model_validate(config))


def distances(engine: VllmEngine, model: Any, params: SamplingParams) -> torch.Tensor:
    """Of log-probs from transformers' in float32."""
    prompts, found = make_prompts(4, seed=2), []
    for c in engine.generate(prompts, params):
        expected = reference_log_probs(model, prompts[c.prompt_index], c.token_ids)
        found.append((expected - torch.tensor(c.log_probs)).abs())
    return torch.cat(found)


def reload_by_layers(engine: VllmEngine, model: Any) -> None:
    """As quantised weights are updated: after an update that ended midway, whole and in two parts.

    Nothing is quantised here, for which a GPU is needed, so the numbers must be the policy's.
    """
    weights: Any = engine._weights
    weights.release()
    train(model, steps=2)
    named = [(name, parameter.data) for name, parameter in model.named_parameters()]
    config = engine._running().vllm_config
    half = QuantizedLoad(weights.target, config)
    half.load(named[: len(named) // 2])
    with pytest.raises(RolloutError, match=r"lacks \d+ of the model's weights"):
        half.finish(complete=True)
    QuantizedLoad(weights.target, config).load(named[:5])  # and no end
    load = QuantizedLoad(weights.target, config)
    load.load(named[:7])
    load.load(named[7:])
    load.finish(complete=True)
    assert engine._running().reset_prefix_cache()


@needs_vllm
@pytest.mark.slow
def test_settings_reach_the_engine_and_change_no_distribution() -> None:
    """Speculation with n-grams, no prefix cache, 64 tokens a pass, and blocks of 64."""
    model = build("qwen2")
    engine = VllmEngine(
        model,
        **SIZES,
        enable_prefix_caching=False,
        max_num_batched_tokens=64,
        engine_kwargs={"speculative_config": NGRAM, "block_size": 64},
    )
    try:
        config: Any = engine._running().vllm_config
        assert config.cache_config.enable_prefix_caching is False
        assert config.cache_config.block_size == 64
        assert config.cache_config.kv_cache_memory_bytes == 32 << 20
        assert config.scheduler_config.max_num_batched_tokens == 64
        assert config.scheduler_config.enable_chunked_prefill is False
        assert config.speculative_config.method == "ngram"
        assert config.model_config.enforce_eager is True
        assert engine.shares_storage
        params = SamplingParams(n=2, max_new_tokens=24, seed=3)
        assert distances(engine, model, params).max() < 1e-4
        train(model, steps=2)
        engine.update_weights(model, 1)
        assert distances(engine, model, params).max() < 1e-4
        reload_by_layers(engine, model)
        assert distances(engine, model, params).max() < 1e-4
    finally:
        engine.close()
