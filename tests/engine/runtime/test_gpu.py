"""`HybridActor` on a GPU: bfloat16, one storage, a switch without copies; skipped without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_cases import prompts
from tiny_engine import tiny_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine import HybridActor, measure_switch_overhead
from engine.parallel import fsdp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]


@pytest.mark.parametrize("graphs", [False, True])
def test_it_generates_and_trains_in_bfloat16(graphs: bool) -> None:
    options = {"cuda_graphs": graphs}
    actor = HybridActor(tiny_model("qwen2").to("cuda", torch.bfloat16), rollout_options=options)
    call = {name: tensor.cuda() for name, tensor in prompts().items()}
    found = actor.generate(**call, max_new_tokens=8)
    assert found.device.type == "cuda"
    assert found.shape == (4, 17)
    assert torch.equal(found[:, :9], call["input_ids"])
    actor.train()
    loss = actor(input_ids=found, labels=found).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in actor.parameters())
    torch.optim.AdamW(actor.parameters(), lr=0.05, fused=True).step()
    assert not torch.equal(actor.generate(**call, max_new_tokens=8), found)


def test_greedy_tokens_are_those_of_transformers() -> None:
    actor = HybridActor(tiny_model("llama").to("cuda", torch.float64))
    call = {name: tensor.cuda() for name, tensor in prompts().items()}
    expected = actor.policy.generate(**call, max_new_tokens=12)
    assert torch.equal(actor.generate(**call, max_new_tokens=12), expected)


@pytest.mark.parametrize("mode", ["train", "rollout"])
def test_a_switch_of_100m_parameters_moves_nothing_and_is_fast(mode: Any) -> None:
    shape = Qwen2Config(
        vocab_size=16384,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    actor = HybridActor(Qwen2ForCausalLM(shape).to("cuda", torch.bfloat16))
    size = sum(p.nbytes for p in actor.parameters()) / 1e6
    cost = measure_switch_overhead(actor, mode)
    assert cost["mem_increase_mb"] <= 0.01 * size
    assert cost["latency_ms"] < 8


def test_steps_on_the_device_are_seen_at_once() -> None:
    actor = HybridActor(tiny_model("qwen2").to("cuda"))
    call = {name: tensor.cuda() for name, tensor in prompts().items()}
    addresses = [p.data_ptr() for p in actor.parameters()]
    before = actor.generate(**call, max_new_tokens=8)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.5)
    actor(input_ids=call["input_ids"], labels=call["input_ids"]).loss.backward()
    optimizer.step()
    after = actor.generate(**call, max_new_tokens=8)
    assert not torch.equal(after, before)
    assert torch.equal(after, actor.policy.generate(**call, max_new_tokens=8))
    assert [p.data_ptr() for p in actor.parameters()] == addresses


PROGRAM = """
import torch
from engine import HybridActor
actor = HybridActor.from_pretrained({folder!r}, dtype="bfloat16")
assert next(actor.parameters()).device.type == "cuda"
ids = torch.tensor([[5, 6, 7]], device="cuda")
found = actor.generate(ids, max_new_tokens=4)
actor(input_ids=found, labels=found).loss.backward()
print("fine", tuple(found.shape))
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_under_torchrun_each_rank_takes_its_device(tiny_folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(tiny_folder)))
    ranks = 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(program)]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": str(root)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("fine (1, 7)") == ranks


def test_offloaded_weights_take_no_memory_between_phases() -> None:
    model = tiny_model("qwen2").to("cuda", torch.bfloat16)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    size, before = sum(w.nbytes for w in weights.values()), torch.cuda.memory_allocated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    offloaded = fsdp.OffloadedWeights(model)
    for step in range(2):
        assert torch.cuda.memory_allocated() <= before - size
        assert all(p.untyped_storage().size() == 0 for p in model.parameters())
        with offloaded.on_device():
            for name, weight in model.named_parameters():
                assert torch.equal(weight, weights[name] - 0.5 * step)
                weight.grad = torch.ones_like(weight)
                weights[name] = weights[name] if step else weight.clone()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("mode", [True, "selective"])
def test_offloaded_activations_leave_the_device_and_change_no_gradient(mode: bool | str) -> None:
    def trained(offload: bool) -> tuple[int, list[torch.Tensor]]:
        model = tiny_model("qwen2").to("cuda", torch.bfloat16)
        fsdp.checkpoint_activations(list(model.model.layers), mode, offload=offload)
        ids = torch.arange(3 * 64, device="cuda").view(3, 64) % 90
        before = torch.cuda.memory_allocated()
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state
        kept = torch.cuda.memory_allocated() - before
        states.float().square().sum().backward()
        return kept, [p.grad for p in model.parameters() if p.grad is not None]

    (kept, gradients), (left, offloaded) = trained(False), trained(True)
    assert len(gradients) == len(offloaded) > 0
    assert all(map(torch.equal, gradients, offloaded))
    config = tiny_model("qwen2").config
    inputs = config.num_hidden_layers * 3 * 64 * config.hidden_size * 2
    assert kept - left >= inputs
