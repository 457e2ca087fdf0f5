"""The memory estimate against what real tensors take, on one process."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tiny_engine import completions_batch, random_completions
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.config import OptimConfig
from engine.models.forward import token_outputs
from engine.parallel.layout import Layout, ModelShape
from engine.planner.memory import (
    activations,
    estimate,
    logits,
    rank_elements,
    stage_elements,
)
from engine.planner.sizes import Candidate, Workload, sizes
from engine.runtime.optimizer import Optimizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_gradients_and_moments_are_those_of_the_model(
    model: Qwen2ForCausalLM, dtype: torch.dtype
) -> None:
    model = copy.deepcopy(model).to(dtype)
    shape = ModelShape.of(model.config)
    real = sum(p.numel() for p in model.parameters())
    assert sizes(shape).total == pytest.approx(real, rel=0.02)  # biases are left out
    optimizer = Optimizer(model, OptimConfig(), 10)
    optimizer.zero_gradients()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    optimizer.step()
    kept = sum(
        value.nbytes
        for state in optimizer.state_dict()["moments"].values()
        for value in state.values()
        if value.dim()
    )
    work = Workload(shape, 4, 2, 8, 8, weight_bytes=dtype.itemsize)
    memory = estimate(work, Candidate(Layout()), gpu=False)
    assert memory.moments == pytest.approx(kept, rel=0.02)
    assert memory.gradients == pytest.approx(gradients, rel=0.02)
    assert memory.weights == pytest.approx(sum(p.nbytes for p in model.parameters()), rel=0.02)


def test_activations_are_about_what_backward_keeps(model: Qwen2ForCausalLM) -> None:
    batch = completions_batch(*random_completions(32, longest_prompt=40, longest_response=40))
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = token_outputs(model, batch, 1.0, entropy=True)
    out.log_probs.sum().backward()
    lengths = batch["attention_mask"].sum(1)
    rows, width = len(lengths), int(lengths.max())
    responses = int(batch["attention_mask"][:, -batch["responses"].shape[1] :].sum())
    work = Workload(ModelShape.of(model.config), rows, 1, width - 1, 1)
    candidate = Candidate(Layout(), tokens=rows * width)
    around_vocabulary = logits(work, Layout(), rows * width)
    layers = activations(work, candidate) - around_vocabulary
    # Of the logits backward keeps the log-softmax; the rest is there for a moment.
    real = sum(kept.values()) - responses * 512 * 4
    assert 0.8 < layers / real < 1.6


def test_shares_and_stages() -> None:
    shape = ModelShape(8, 8, 4, 32, 256, 512, 5000, tied=True)
    parts = sizes(shape)
    assert rank_elements(shape, Layout(fsdp=2, tp=2, dp=3)) == parts.total / 4
    assert rank_elements(shape, Layout(fsdp=2, sp=2)) == parts.total / 4
    assert stage_elements(shape, 1) == parts.total == 8 * parts.layer + 5000 * 256
    two = stage_elements(shape, 2)  # both ends have the tied table
    assert parts.total / 2 < two < parts.total


def test_what_each_setting_saves() -> None:
    shape = ModelShape(8, 8, 4, 32, 256, 512, 5000)
    work = Workload(shape, 64, 4, 64, 64, reference=True)
    plain = estimate(work, Candidate(Layout()), gpu=True)
    recomputed = estimate(work, Candidate(Layout(), activation_checkpointing=True), gpu=True)
    assert recomputed.activations < 0.6 * plain.activations
    away = estimate(work, Candidate(Layout(), offload_optimizer=True), gpu=True)
    assert away.host == plain.host + plain.moments
    sharded = Candidate(Layout(fsdp=4), rollout_tp=1)
    four = estimate(work, sharded, gpu=True)
    assert four.weights == plain.weights / 4
    assert four.rollout == plain.weights / 2
    assert plain.rollout == 0  # decodes with the trainer's storage
    lower = estimate(work, Candidate(Layout(fsdp=4), offload_params=True), gpu=True)
    assert lower.weights == lower.moments == lower.gradients == 0.0
    assert lower.host > four.host
    adapted = Workload(shape, 64, 4, 64, 64, adapters=1000)
    assert estimate(adapted, Candidate(Layout()), gpu=True).moments == 8000
    spread = estimate(adapted, Candidate(Layout(fsdp=4)), gpu=True)
    assert spread.loading < spread.weights + (65 << 20), "ranks load their shards"
    assert spread.host < 100_000, "and none has the base in its machine's memory"
    whole = estimate(replace(adapted, quantized=True), Candidate(Layout(fsdp=4)), gpu=True)
    assert whole.loading > spread.loading or whole.host > spread.host
    shared = estimate(work, Candidate(Layout(tp=4), rollout_tp=4), gpu=True)
    assert shared.rollout == 0
    assert shared.cache < plain.cache * 4
