"""vLLM's options, arguments and admission."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_models import CONTEXT, build, make_prompts, reference_log_probs, train
from stream_checks import Found, drain, texts, worst_error

from engine.config import LoRAConfig, RolloutConfig
from engine.errors import ConfigError, RolloutError
from engine.models import add_adapters
from engine.rollout.protocol import SamplingParams, check_engine_settings, create_engine
from engine.rollout.vllm import options
from engine.rollout.vllm.engine import VllmEngine
from engine.rollout.vllm.engine_launch import _lora_rank_size
from engine.rollout.vllm.options import argument_names, engine_arguments, resolve
from engine.rollout.vllm.vllm_stream import KvAdmission, Row
from engine.rollout.vllm.weight_load import QuantizedLoad

DEFAULTS: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_memory_mb": 32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0 is too small"),
        ({"bucket_mb": 0}, "bucket_mb=0: Input should be greater than or equal to 1"),
        ({"kv_cache_memory_mb": 0}, "kv_cache_memory_mb=0 is too small"),
        ({"max_model_len": 4096}, "max_model_len=4096 exceeds the model's context of 128"),
        ({"dtype": "int8"}, "dtype='int8': Input should be '', 'float32', 'bfloat16' or 'float16'"),
        ({"lora": "own"}, "rollout.lora='own' is unknown; set merged or adapter"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 is no number of workers"),
        ({"tensor_parallel_size": 3}, "3 does not divide the model's num_attention_heads=4"),
        (
            {"tensor_parallel_size": 2, "rank_groups": [[0], [1]]},
            r"rank_groups=\[\[0\], \[1\]\] must have each rank from 0 once, in groups of tens.*=2",
        ),
        ({"rank_groups": [[0], [2]]}, "must have each rank from 0 once"),
        ({"rank_groups": [[0], [0]]}, "must have each rank from 0 once"),
    ],
)
def test_what_cannot_be_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(build("qwen2"), **(DEFAULTS | changes))


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "in_process"),
        ({"in_process": False}, "workers"),
        ({"tensor_parallel_size": 2}, "workers"),
        ({"rank_groups": [[0], [1]]}, "ranks"),
        ({"tensor_parallel_size": 2, "rank_groups": [[0, 2], [3, 1]]}, "ranks"),
    ],
)
def test_where_the_model_runs(changes: dict[str, Any], mode: str) -> None:
    options = resolve(build("qwen2"), **(DEFAULTS | changes))
    assert options.mode == mode
    assert (options.dtype, options.max_model_len, options.adapter_rank) == ("float32", 128, 0)


def test_ranks_without_a_process_group_are_refused() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with pytest.raises(ConfigError, match=r"the default process group has [01]; create it first"):
        VllmEngine(build("qwen2"), rank_groups=[[0], [1]], tensor_parallel_size=1)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (4, 8), (8, 8), (33, 64), (512, 512)])
def test_adapter_ranks_are_rounded_up_to_vllms_sizes(rank: int, size: int) -> None:
    assert _lora_rank_size(rank) == size


def test_an_adapter_that_is_too_large_is_merged_instead() -> None:
    with pytest.raises(RolloutError, match=r"up to rank 512, not 513; set rollout.lora=merged"):
        _lora_rank_size(513)


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
    ],
)
def test_what_cannot_go_is_refused_by_name(tuning: dict[str, Any], message: str) -> None:
    config = RolloutConfig.model_validate({"engine": "vllm", "vllm": tuning})
    with pytest.raises(ConfigError, match=message):
        check_engine_settings(config)


def test_quantised_weights_have_the_adapters_in_them() -> None:
    config = {"engine": "vllm", "lora": "adapter", "vllm": {"quantization": "fp8"}}
    with pytest.raises(ConfigError, match="are quantised with the adapters merged into them"):
        check_engine_settings(RolloutConfig.model_validate(config))


def adapted(family: str, targets: Any) -> Any:
    model: Any = build(family)
    add_adapters(model, LoRAConfig(rank=4, target_modules=targets), seed=1)
    return model


@pytest.mark.parametrize(
    ("lora", "on_gpu", "family", "targets", "apart"),
    [
        ("", True, "qwen2", "all-linear", True),
        ("", True, "qwen2", ("q_proj", "down_proj"), True),
        ("", True, "llama", ("embed_tokens",), False),
        ("", True, "gpt2", "all-linear", False),
        ("", False, "qwen2", "all-linear", False),
        ("merged", True, "qwen2", "all-linear", False),
        ("adapter", False, "gpt2", "all-linear", True),
    ],
)
def test_which_adapters_vllm_applies_itself(
    lora: str,
    on_gpu: bool,
    family: str,
    targets: Any,
    apart: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "on_gpu", lambda: on_gpu)
    found = resolve(adapted(family, targets), **DEFAULTS, lora=lora)
    assert found.adapter_rank == (4 if apart else 0)
    assert found.share == apart, "the base, which is the trainer's"


def test_two_sizes_of_one_cache_contradict() -> None:
    config = {"engine": "vllm", "kv_cache_memory_mb": 64, "vllm": {"gpu_memory_utilization": 0.7}}
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0.7 has no effect with .*=64"):
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


def room(tokens: int, **changes: Any) -> KvAdmission:
    return KvAdmission(**{"capacity": tokens, "block": 10, "shares_prompts": True} | changes)


@pytest.mark.parametrize(
    ("subject", "running", "waiting", "count"),
    [
        # 30 of the prompt once, then 10 of its rest and 50 of each completion
        (room(200), [], [Row("a", 35, 50)] * 4, 2),
        (room(210), [], [Row("a", 35, 50)] * 4, 3),
        (room(210), [Row("a", 35, 50)], [Row("a", 35, 50)] * 4, 2),
        (room(210, shares_prompts=False), [], [Row("a", 35, 50)] * 4, 2),
        (room(210), [], [Row(key, 35, 50) for key in "abcd"], 2),
        (room(50), [], [Row("a", 35, 50)] * 4, 1),  # vLLM itself has found that one fits
        (room(50), [Row("b", 5, 5)], [Row("a", 35, 50)] * 4, 0),
        # (20 + 2 · 10) / 2 ended: as long as 20, where the limit is 50
        (room(100, ended=2, sampled=20), [Row("a", 5, 45, 10)] * 2, [Row("b", 5, 45)] * 4, 1),
        (room(100, ended=2, sampled=20), [Row("a", 5, 45, 40)] * 2, [Row("b", 5, 45)] * 4, 0),
    ],
)
def test_how_many_may_begin(
    subject: KvAdmission, running: list[Row], waiting: list[Row], count: int
) -> None:
    assert subject.count(running, waiting) == count


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(100, 400))
def test_completions_of_the_longest_never_outgrow_the_cache(
    prompts: list[int], tokens: int
) -> None:
    """Each admitted as soon as it may be, and a token a step; all end at the limit."""
    subject, limit = room(tokens), 40
    waiting = [Row(i, prompt, limit) for i, prompt in enumerate(prompts)]
    running: list[Row] = []
    for _ in range(41 * len(prompts)):
        count = subject.count(running, waiting)
        running, waiting = running + waiting[:count], waiting[count:]
        running = [row._replace(tokens=row.tokens + 1) for row in running]
        assert sum(-(-(row.prompt + row.tokens) // 10) * 10 for row in running) <= tokens
        for row in running:
            if row.tokens == limit:
                subject.end(limit)
        running = [row for row in running if row.tokens < limit]
        if not running and not waiting:
            return
    raise AssertionError("they don't end")


PROMPTS = {key: [5 + key] * (40 + 3 * key) for key in range(8)}


PARAMS = SamplingParams(n=4, max_new_tokens=80, seed=3)


NEED = sum(len(prompt) + 4 * 80 for prompt in PROMPTS.values())


def streamed(cache_mb: int, params: SamplingParams) -> tuple[Found, int, int, int]:
    """What is found; preemptions; tokens of the cache; the most that waited."""
    model = build("qwen2")
    engine = create_engine(
        "vllm", model, max_num_seqs=32, max_model_len=CONTEXT, kv_cache_memory_mb=cache_mb, seed=0
    )
    core: Any = engine
    scheduler = core._llm.llm_engine.engine_core.engine_core.scheduler
    preempted, preempt = [0], scheduler._preempt_request

    def counted(*arguments: Any, **options: Any) -> Any:
        preempted[0] += 1
        return preempt(*arguments, **options)

    scheduler._preempt_request = counted
    try:
        stream = core.stream(params)
        for key, prompt in PROMPTS.items():
            stream.submit(key, prompt)
        waited = stream.waiting
        return drain(stream), preempted[0], core._requests.kv_cache()[0], waited
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_long_contexts_in_a_small_cache_wait_and_are_computed_once() -> None:
    wanted, _, large, none = streamed(64, PARAMS)
    assert large > NEED
    assert none == 0
    found, preempted, small, waited = streamed(1, PARAMS)
    assert small < NEED / 2
    assert waited > 0
    assert preempted == 0
    assert texts(found) == texts(wanted)
    assert worst_error("qwen2", PROMPTS, found) < 1e-4
    # Of mixed lengths more begin, as not all get as long as they may.
    mixed = replace(PARAMS, stop_token_ids=tuple(range(20, 24)))
    ended, preempted, _, _ = streamed(1, mixed)
    assert len(ended) == 32
    assert preempted <= 2
