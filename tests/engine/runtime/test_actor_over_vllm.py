"""`HybridActor` with vLLM decoding in the trainer's storage, and the package's lazy names."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from hybrid_cases import prompts, step
from tiny_engine import tiny_model
from transformers import Qwen2ForCausalLM

from engine import HybridActor, measure_switch_overhead

pytestmark = pytest.mark.usefixtures("one_thread")


def test_with_vllm_steps_are_seen_and_the_switch_copies_nothing() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    torch.manual_seed(0)
    shape = copy.deepcopy(tiny_model("qwen2").config)
    shape.update({"hidden_size": 128, "head_dim": 32})  # vLLM has no attention for small heads
    options = {"max_num_seqs": 8, "max_model_len": 64, "kv_cache_memory_mb": 32}
    policy = Qwen2ForCausalLM(shape)
    actor = HybridActor(policy, rollout_engine="vllm", rollout_options=options)
    try:
        for version, fused in enumerate([False, True]):
            found = actor.generate(**prompts(), max_new_tokens=8)
            assert torch.equal(found, policy.generate(**prompts(), max_new_tokens=8))
            assert actor.policy_version == version
            step(actor, fused)
        cost = measure_switch_overhead(actor, "rollout", repeats=3)
        assert cost["mem_increase_mb"] <= 0.01 * sum(p.nbytes for p in policy.parameters()) / 1e6
    finally:
        actor.close()
