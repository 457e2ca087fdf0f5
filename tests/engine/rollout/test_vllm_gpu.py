"""vLLM on a CUDA device beside the trainer: bfloat16, shared storage, and what sleep gives back."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rollout_models import make_prompts
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.errors import RolloutError
from engine.rollout.protocol import SamplingParams
from engine.rollout.vllm import VllmEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MB = 1 << 20
KV_MB = 512
SIZES: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 256}
OPTIONS = SIZES | {"kv_cache_memory_mb": KV_MB, "enforce_eager": True}  # no minute of compiling
PARAMS = SamplingParams(n=4, max_new_tokens=24, seed=1)


def policy(dtype: torch.dtype) -> Any:
    """About 120M parameters, so that its memory shows beside what libraries take."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to("cuda", dtype)


def used_mb() -> float:
    """Memory of the whole device that is taken: torch does not count what vLLM maps itself."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MB


def weights_mb(model: nn.Module, bytes_each: int = 2) -> float:
    return sum(p.numel() for p in model.parameters()) * bytes_each / MB


@torch.no_grad()
def errors(engine: VllmEngine, model: Any) -> torch.Tensor:
    """Distances of log-probs from transformers', over several completions."""
    prompts = [[token % 32000 for token in prompt] for prompt in make_prompts(6, seed=4)]
    found = []
    for c in engine.generate(prompts, PARAMS):
        prompt = prompts[c.prompt_index]
        ids = torch.tensor([[*prompt, *c.token_ids]], device="cuda")
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        found.append((expected - torch.tensor(c.log_probs)).abs())
    return torch.cat(found)


def close_enough(engine: VllmEngine, model: Any) -> bool:
    """Within what bfloat16 rounds on two sets of kernels."""
    found = errors(engine, model)
    return float(found.max()) < 0.2 and float(found.mean()) < 0.03


@pytest.fixture
def shared() -> Iterator[tuple[VllmEngine, Any]]:
    """bfloat16 on both sides, one storage."""
    model = policy(torch.bfloat16)
    state = torch.cuda.get_rng_state()
    engine = VllmEngine(model, **OPTIONS)
    assert torch.equal(torch.cuda.get_rng_state(), state), "the trainer's generator is unchanged"
    yield engine, model
    engine.close()


@pytest.fixture
def copied() -> Iterator[tuple[VllmEngine, Any]]:
    """A float32 trainer and a bfloat16 engine: vLLM has weights of its own, which can sleep."""
    model = policy(torch.float32)
    engine = VllmEngine(model, dtype="bfloat16", **OPTIONS)
    yield engine, model
    engine.close()


def test_bfloat16_storage_is_shared_and_trained_on(shared: tuple[VllmEngine, Any]) -> None:
    engine, model = shared
    assert engine.shares_storage
    inner = engine.parameters()
    attention = model.model.layers[0].self_attn
    fused = inner["model.layers.0.self_attn.qkv_proj.weight"]
    assert attention.q_proj.weight.data_ptr() == fused.data_ptr()
    assert model.lm_head.weight.data_ptr() == inner["model.embed_tokens.weight"].data_ptr()
    assert close_enough(engine, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, 32000, (4, 32), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    before = torch.cuda.memory_allocated()
    engine.update_weights(model, 1)
    assert torch.cuda.memory_allocated() == before
    assert close_enough(engine, model)


@pytest.mark.parametrize("level", [1, 2])
def test_shared_weights_stay_when_the_cache_sleeps(
    shared: tuple[VllmEngine, Any], level: int
) -> None:
    engine, model = shared
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    awake = used_mb()
    engine.sleep(level)
    assert awake - used_mb() > 0.9 * KV_MB
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    ids = torch.randint(0, 32000, (2, 16), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()  # the trainer works meanwhile
    engine.wake_weights()
    engine.update_weights(model, 1)
    engine.wake_kv()
    assert engine.shares_storage
    assert close_enough(engine, model)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_come_back_before_the_cache_does(
    copied: tuple[VllmEngine, Any], level: int
) -> None:
    """offload → wake weights → sync → wake KV: the two are never brought up in one step."""
    engine, model = copied
    assert not engine.shares_storage
    weights = weights_mb(model)
    awake = used_mb()
    engine.sleep(level)
    asleep = used_mb()
    assert awake - asleep > 0.9 * (KV_MB + weights)
    engine.wake_weights()
    only_weights = used_mb()
    assert 0.9 * weights < only_weights - asleep < weights + 0.5 * KV_MB
    if level == 2:
        with pytest.raises(RolloutError, match="discarded the old ones"):
            engine.wake_kv()
    else:
        assert not float(next(iter(engine.parameters().values())).isnan().any())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    engine.update_weights(model, 1)
    assert (torch.cuda.max_memory_allocated() - allocated) / MB < 0.5 * weights
    assert used_mb() - only_weights < 0.1 * KV_MB + 0.5 * weights
    engine.wake_kv()
    assert abs(used_mb() - awake) < 0.2 * KV_MB
    assert close_enough(engine, model)


def test_level_1_serves_again_without_an_update(copied: tuple[VllmEngine, Any]) -> None:
    engine, model = copied
    engine.sleep(1)
    engine.wake_weights()
    engine.wake_kv()
    assert close_enough(engine, model)


def test_an_ended_engine_gives_its_memory_back() -> None:
    model = policy(torch.float32)
    before = used_mb()
    VllmEngine(model, dtype="bfloat16", **OPTIONS).close()
    assert used_mb() - before < 0.5 * (KV_MB + weights_mb(model))


def test_by_default_it_takes_its_share_of_the_device_and_captures_graphs() -> None:
    model, before = policy(torch.bfloat16), used_mb()
    total = torch.cuda.mem_get_info()[1] / MB
    engine = VllmEngine(model, **SIZES, gpu_memory_utilization=0.3)
    try:
        config: Any = engine._running().vllm_config
        assert config.scheduler_config.enable_chunked_prefill
        assert config.compilation_config.cudagraph_mode.name != "NONE"
        assert 0.2 * total < used_mb() - before < 0.4 * total
        assert engine.shares_storage
        assert close_enough(engine, model)
        with torch.no_grad():  # graphs read the weights where they were captured
            for parameter in model.parameters():
                parameter.mul_(1.02)
        engine.update_weights(model, 1)
        assert close_enough(engine, model)
        engine.sleep(2)
        assert used_mb() - before < 0.1 * total
    finally:
        engine.close()


def test_fp8_weights_follow_a_bfloat16_policy() -> None:
    model = policy(torch.bfloat16)
    engine = VllmEngine(model, **OPTIONS, quantization="fp8")
    try:
        assert not engine.shares_storage
        assert float(errors(engine, model).mean()) < 0.1
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(-0.8 if "proj.weight" in name else 1.0)
        engine.update_weights(model, 1)
        assert float(errors(engine, model).mean()) < 0.1
    finally:
        engine.close()
