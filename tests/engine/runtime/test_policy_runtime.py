"""The policy runtime, over vLLM too."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from hybrid_cases import prompts, step
from tiny_engine import save_family, tiny_model, training_batch
from transformers import Qwen2ForCausalLM

from engine import HybridActor, measure_switch_overhead
from engine.config import ActorConfig
from engine.errors import RolloutError
from engine.rollout.protocol import SamplingParams
from engine.runtime.policy_runtime import PolicyRuntime
from engine.runtime.rollout_weights import SharedWeights
from engine.workers.actor import ActorWorker
from engine.workers.role import WorkerContext

pytestmark = pytest.mark.usefixtures("one_thread")


PROMPT = [5, 6, 7]


GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0)


@pytest.fixture
def worker(tmp_path: Path) -> ActorWorker:
    config = ActorConfig.model_validate({"use_kl_loss": False, "optim": {"lr": 0.1}})
    return ActorWorker(
        WorkerContext("actor"),
        model_path=str(save_family("qwen2", tmp_path / "model")),
        config=config,
        temperature=1.0,
        total_steps=10,
        seed=0,
    )


def check_greedy_sample(policy: PolicyRuntime) -> list[float]:
    """The log-probs of a greedy completion, which must be those of the policy's weights."""
    (done,) = policy.engine.generate([PROMPT], GREEDY)
    with torch.no_grad():
        logits = policy.module(torch.tensor([[*PROMPT, *done.token_ids]])).logits[0, 2:-1]
    log_probs = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.log_probs), log_probs, atol=1e-4, rtol=0)
    assert done.policy_version == policy.version
    return done.log_probs


def test_the_actor_worker_and_the_hybrid_actor_have_the_same_type(worker: ActorWorker) -> None:
    policy = worker.context.process.policy
    assert policy is worker.policy
    assert type(policy) is type(HybridActor(tiny_model("qwen2")).runtime) is PolicyRuntime


def test_rollout_after_an_update_samples_with_the_new_weights(worker: ActorWorker) -> None:
    policy = worker.policy
    policy.init_rollout("native", SharedWeights(policy.module), {"max_model_len": 64})
    before = check_greedy_sample(policy)
    for version in (1, 2):
        worker.update(training_batch(4))
        assert policy.version == version
    policy.sync_weights()
    assert check_greedy_sample(policy) != before
    worker.skip_update()
    assert policy.version == 3
    policy.close()


def test_a_policy_without_rollout_has_no_engine() -> None:
    with pytest.raises(RolloutError, match="call init_rollout first"):
        PolicyRuntime(tiny_model("qwen2")).engine  # noqa: B018


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
