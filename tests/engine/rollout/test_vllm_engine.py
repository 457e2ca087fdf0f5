"""The vLLM engine's own promises: shared storage, a clean process, copies as the fallback."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flask.globals  # noqa: F401 (its proxies once broke the start of vLLM)
import numpy as np
import pytest
import torch
from rollout_models import CONTEXT, Subject, build, make_prompts, reference_log_probs, train
from transformers import Qwen2ForCausalLM

from engine.errors import RolloutError
from engine.rollout.protocol import SamplingParams, create_engine
from engine.rollout.vllm import VllmEngine
from engine.rollout.vllm.weight_load import ParameterSnapshot

with contextlib.suppress(ImportError):  # it comes with vLLM
    import llvmlite.binding  # noqa: F401 (its functions once broke the start of an engine, too)

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


@needs_vllm
def test_the_fused_parameters_are_the_trainers(vllm_subject: Subject) -> None:
    engine, model = vllm_subject.engine, vllm_subject.model
    assert isinstance(engine, VllmEngine)
    assert engine.shares_storage
    engine.update_weights(model, engine.policy_version)
    inner = engine.parameters()
    for index, layer in enumerate(model.model.layers):
        fused = inner[f"model.layers.{index}.self_attn.qkv_proj.weight"]
        start = fused.data_ptr()
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            assert projection.weight.data_ptr() == start
            assert projection.weight.is_contiguous()
            start += projection.weight.numel() * 4
        gate_up = inner[f"model.layers.{index}.mlp.gate_up_proj.weight"]
        assert layer.mlp.gate_proj.weight.data_ptr() == gate_up.data_ptr()
    assert model.lm_head.weight.data_ptr() == inner["model.embed_tokens.weight"].data_ptr()


@needs_vllm
def test_a_switch_takes_less_than_a_millisecond_and_no_memory(vllm_subject: Subject) -> None:
    """An optimizer step writes where vLLM reads; what is left is to forget the prefix cache."""
    engine, model = vllm_subject.engine, vllm_subject.model
    engine.update_weights(model, engine.policy_version)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    seconds = []
    for _ in range(10):
        model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        started = time.perf_counter()
        engine.update_weights(model, engine.policy_version + 1)
        seconds.append(time.perf_counter() - started)
        c = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4))[0]
        expected = reference_log_probs(model, [5, 6, 7], c.token_ids)
        assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)
    assert min(seconds) < 1e-3
    assert pointers == {name: p.data_ptr() for name, p in model.named_parameters()}


def move_storage(model: torch.nn.Module) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.clone()


def replace_parameter(model: torch.nn.Module) -> None:
    module = model.model.layers[1].mlp.down_proj
    module.weight = torch.nn.Parameter(module.weight.detach().clone())


def replace_module(model: torch.nn.Module) -> None:
    model.model.layers[0].self_attn.o_proj = copy.deepcopy(model.model.layers[0].self_attn.o_proj)


def add_parameter(model: torch.nn.Module) -> None:
    model.model.norm.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))


MOVES = [move_storage, replace_parameter, replace_module, add_parameter]


@pytest.mark.parametrize("move", MOVES)
def test_whatever_takes_weights_away_is_seen(move: Callable[[torch.nn.Module], None]) -> None:
    model = build("qwen2")
    snapshot = ParameterSnapshot(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.train()
    assert snapshot.is_current(), "a step and a change of mode move nothing"
    move(model)
    assert not snapshot.is_current()


@needs_vllm
@pytest.mark.parametrize("move", MOVES[:3])
def test_weights_that_were_taken_away_are_served_all_the_same(
    vllm_subject: Subject, move: Callable[[torch.nn.Module], None]
) -> None:
    engine, model = vllm_subject.engine, vllm_subject.model
    engine.update_weights(model, engine.policy_version)
    move(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.update_weights(model, engine.policy_version + 1)
    c = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4))[0]
    expected = reference_log_probs(model, [5, 6, 7], c.token_ids)
    assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)
    assert engine.shares_storage, "they are one again"


@needs_vllm
def test_an_error_of_the_progress_callback_leaves_no_request(vllm_subject: Subject) -> None:
    engine, model = vllm_subject.engine, vllm_subject.model

    def stop(finished: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(make_prompts(20), SamplingParams(n=2, max_new_tokens=9), stop)
    engine.update_weights(model, engine.policy_version + 1)
    assert len(engine.generate([[5]], SamplingParams(n=3, max_new_tokens=4))) == 3


@needs_vllm
def test_long_shared_prompts_see_new_weights(vllm_subject: Subject) -> None:
    """Prefix caching works on blocks; a stale block would give the old weights' log-probs."""
    engine, model = vllm_subject.engine, vllm_subject.model
    prompt = (make_prompts(1, seed=3)[0] * CONTEXT)[: CONTEXT - 4]
    params = SamplingParams(n=2, max_new_tokens=4, seed=1)
    for _ in range(2):
        train(model, steps=2)
        engine.update_weights(model, engine.policy_version + 1)
        for c in engine.generate([prompt], params):
            expected = reference_log_probs(model, prompt, c.token_ids)
            assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)


@needs_vllm
def test_saving_and_state_dicts_work_on_views(vllm_subject: Subject, tmp_path: Path) -> None:
    model = vllm_subject.model
    vllm_subject.engine.update_weights(model, vllm_subject.engine.policy_version)
    model.save_pretrained(tmp_path / "model")
    again = Qwen2ForCausalLM.from_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
        assert torch.equal(state[name], parameter)


@needs_vllm
def test_optimizer_states_outlive_sharing(vllm_subject: Subject) -> None:
    """Sharing, an update to another model and back must leave training as it would have been."""
    engine = vllm_subject.engine
    shared, alone = build("qwen2"), build("qwen2")
    ids = make_prompts(1, seed=12)[0] * 2
    batch = torch.tensor([ids])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (shared, alone)]
    for step in range(3):
        if step == 1:
            engine.update_weights(shared, engine.policy_version + 1)
        if step == 2:
            engine.update_weights(vllm_subject.model, engine.policy_version + 1)
        for model, optimizer in zip((shared, alone), optimizers, strict=True):
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in alone.named_parameters():
        assert torch.equal(shared.get_parameter(name), parameter)


@needs_vllm
def test_a_layout_that_cannot_be_shared_is_copied_and_the_process_left_clean() -> None:
    """Steps are short here, so that prompts have to wait for the next one instead of being cut."""
    model = build("gpt2")
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    environment = dict(os.environ)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    set_threads = torch.set_num_threads
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 64, "kv_cache_memory_mb": 32}
    engine = VllmEngine(model, **sizes, max_num_batched_tokens=64)
    try:
        assert dict(os.environ) == environment
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (np.random.get_state()[1] == states[1]).all()
        assert random.getstate() == states[2]
        assert torch.set_num_threads is set_threads
        assert torch.get_num_threads() == 1
        assert not engine.shares_storage
        pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
        for version in (1, 2):
            train(model, steps=2)
            engine.update_weights(model, version)
            prompts = [[5, 6, 7], [9] * 30, [8] * 40, [7] * 50]
            for c in engine.generate(prompts, SamplingParams(n=2, max_new_tokens=6, seed=1)):
                expected = reference_log_probs(model, prompts[c.prompt_index], c.token_ids)
                assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)
        assert pointers == {n: p.data_ptr() for n, p in model.named_parameters()}
    finally:
        engine.close()
        engine.close()
    with pytest.raises(RolloutError, match="closed"):
        engine.generate([[5]], SamplingParams())


def test_without_vllm_the_message_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else real(name, *a)
    )
    with pytest.raises(RolloutError, match=r"rollout\.engine=native"):
        create_engine("vllm", build("qwen2"))


@needs_vllm
def test_a_head_size_without_a_kernel_is_refused_at_the_start() -> None:
    model = build("qwen2")
    model.config.num_attention_heads = 8
    with pytest.raises(RolloutError, match="head size of 16"):
        VllmEngine(model)
