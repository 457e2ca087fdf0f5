"""The native engine on a GPU: bfloat16, CUDA graphs, shards; skipped without one."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rollout_models import build, make_prompts
from stream_checks import drain, generated, texts, with_n
from tensor_parallel_cases import GREEDY, model_of, tp_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.config import LoRAConfig
from engine.models import adapter_parameters, add_adapters
from engine.rollout.native import NativeEngine
from engine.rollout.protocol import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]


@torch.no_grad()
def forward_log_probs(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """transformers' log-prob of each of `tokens` after `prompt`, on the CPU."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]], device="cuda")).logits[0].float()
    scored = logits[len(prompt) - 1 : -1].log_softmax(-1).cpu()
    return scored.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_bfloat16_stays_near_the_trainers_forward(graphs: bool, n: int) -> None:
    model, prompts = build("qwen2").to("cuda", torch.bfloat16), make_prompts(6)
    engine = NativeEngine(model, cuda_graphs=graphs)
    done = engine.generate(prompts, SamplingParams(n=n, max_new_tokens=24))
    errors = torch.cat(
        [
            torch.tensor(c.log_probs)
            - forward_log_probs(model, prompts[c.prompt_index], c.token_ids)
            for c in done
        ]
    ).abs()
    assert errors.max() < 0.2
    assert errors.mean() < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("graphs", [False, True])
def test_adapters_beside_the_base_are_the_trainers(dtype: torch.dtype, graphs: bool) -> None:
    """Over two updates; in bfloat16 they are nearer than merged ones, which are rounded."""
    model: Any = build("qwen2").to(dtype)
    add_adapters(model, LoRAConfig(rank=4, alpha=8.0), seed=1)
    model.cuda()
    prompts, draw = make_prompts(6), torch.Generator().manual_seed(0)
    engines = {
        lora: NativeEngine(model, cuda_graphs=graphs, lora=lora) for lora in ("adapter", "merged")
    }
    for version in (1, 2):
        with torch.no_grad():
            for parameter in adapter_parameters(model).values():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw).cuda())
        mean = dict[str, float]()
        for lora, engine in engines.items():
            engine.update_weights(model, version)
            done = engine.generate(prompts, SamplingParams(n=4, max_new_tokens=24, seed=version))
            errors = torch.cat(
                [
                    torch.tensor(c.log_probs)
                    - forward_log_probs(model, prompts[c.prompt_index], c.token_ids)
                    for c in done
                ]
            ).abs()
            mean[lora] = float(errors.mean())
            assert errors.max() < (1e-4 if dtype == torch.float32 else 0.4)
        assert dtype == torch.float32 or mean["adapter"] < mean["merged"]
        assert mean["adapter"] < 0.03


@pytest.mark.parametrize("graphs", [False, True])
def test_adapters_beside_the_base_need_no_second_one(graphs: bool) -> None:
    """The device's peak memory in a rollout shows it."""
    shape = Qwen2Config(hidden_size=512, intermediate_size=2048, num_hidden_layers=6, vocab_size=99)
    model: Any = Qwen2ForCausalLM(shape).bfloat16()
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    add_adapters(model, LoRAConfig(rank=4, alpha=8.0), seed=1)
    model.cuda()
    peaks = dict[str, int]()
    for lora in ("adapter", "merged"):
        engine = NativeEngine(model, max_model_len=32, cuda_graphs=graphs, lora=lora)
        engine.generate([[5, 6, 7]], SamplingParams(n=2, max_new_tokens=8))  # libraries' own memory
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.generate([[5, 6, 7]], SamplingParams(n=2, max_new_tokens=8))
        peaks[lora] = torch.cuda.max_memory_allocated() - before
    assert peaks["merged"] - peaks["adapter"] > 5.5 * layer, "of the six layers"


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "mistral"])
def test_graphs_give_the_tokens_of_plain_steps(family: str) -> None:
    model, prompts = build(family).to("cuda", torch.float64), make_prompts(8)
    params = SamplingParams(n=3, max_new_tokens=60, seed=2, stop_token_ids=tuple(range(20, 26)))
    found = NativeEngine(model, max_num_seqs=9, cuda_graphs=True).generate(prompts, params)
    expected = NativeEngine(model, max_num_seqs=9).generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]


def test_graphs_see_a_step_of_the_optimizer() -> None:
    """The rollout after a step, and a stream with rows in flight."""
    model = build("llama").to("cuda", torch.float64)
    engine, prompts = NativeEngine(model, cuda_graphs=True), make_prompts(5)
    stream = engine.stream(with_n(3, stop_token_ids=()))
    for key, prompt in enumerate(prompts):
        stream.submit(key, prompt)
    for _ in range(8):
        stream.step()
    before = generated(engine, prompts, with_n(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    stream.update_weights(None, 1)
    after = generated(engine, prompts, with_n(3))
    assert texts(after) != texts(before)
    assert texts(after) == texts(generated(NativeEngine(model), prompts, with_n(3)))
    assert {tuple(c.token_versions or ()) for c in drain(stream).values()} == {(0,) * 9 + (1,) * 15}


def test_graphs_pay_for_a_small_model() -> None:
    """One row for long: launching kernels is all that a plain step does."""
    model = build("qwen2").to("cuda", torch.bfloat16)
    params = SamplingParams(max_new_tokens=100, temperature=0.0)
    seconds = {}
    for graphs in (False, True):
        engine = NativeEngine(model, cuda_graphs=graphs)
        engine.generate([[5, 6]], params)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(3):
            engine.generate([[5, 6]], params)
        torch.cuda.synchronize()
        seconds[graphs] = time.perf_counter() - started
    assert seconds[True] < seconds[False]


def test_a_rollout_moves_no_weight_and_frees_its_cache() -> None:
    model = build("qwen2").to("cuda", torch.bfloat16)
    addresses = [p.data_ptr() for p in model.parameters()]
    engine = NativeEngine(model)
    engine.generate(make_prompts(8), SamplingParams(n=2, max_new_tokens=30))
    before = torch.cuda.memory_allocated()
    engine.generate(make_prompts(8), SamplingParams(n=2, max_new_tokens=30))
    assert torch.cuda.memory_allocated() <= before
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_a_shard_decodes_as_one_rank_does() -> None:
    """A group of one, on NCCL: the collectives' path on a device."""
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29655", rank=0, world_size=1)
    try:
        model = model_of("qwen2").to("cuda", torch.bfloat16)
        found = NativeEngine(tp_shard(model)).generate(make_prompts(4), GREEDY)
        expected = NativeEngine(model).generate(make_prompts(4), GREEDY)
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    finally:
        dist.destroy_process_group()
