"""Rollout on ranks, by vLLM too."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import RankError, run_ranks
from thorough import and_slow
from tiny_engine import TINY_MODEL, training_batch, write_tiny_folder
from transformers import AutoConfig, AutoModelForCausalLM

from engine.batch import Batch
from engine.config import ActorConfig, LoRAConfig, RolloutConfig
from engine.controller.worker_host import shard_rows
from engine.data.tokenizer import load_tokenizer
from engine.models import load_model, save_model
from engine.parallel.layout import Layout, rollout_layout
from engine.runtime.rollout_weights import (
    AdapterWeights,
    MergedWeights,
    ReshardedWeights,
    SharedWeights,
    StreamedWeights,
    VllmWeights,
)
from engine.workers.actor import ActorWorker
from engine.workers.role import ProcessState, WorkerContext
from engine.workers.rollout_worker import RolloutWorker

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [5, 9], [21, 22], [7, 7, 7]]


ROWS = 4


def course(
    folder: str,
    parallel: dict[str, Any],
    tp: int,
    lora: int = 0,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Sample, update, sample again, on this rank's share of the prompts."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = ActorConfig.model_validate(
        {"use_kl_loss": False, "optim": {"lr": 2e-2, "warmup_ratio": 0.0}, "parallel": parallel}
    )
    layout = Layout.of(config.parallel)
    training, sampling = layout, rollout_layout(layout, tp=tp)
    process = ProcessState()
    common: dict[str, Any] = {"model_path": folder, "seed": 0, "lora": LoRAConfig(rank=lora)}
    actor = ActorWorker(
        WorkerContext("actor", rank, world, process, training),
        config=config,
        temperature=1.0,
        total_steps=3,
        **common,
    )
    rollout = RolloutWorker(
        WorkerContext("rollout", rank, world, process, sampling),
        config=RolloutConfig.model_validate({"n": 2, "tensor_parallel_size": tp} | (options or {})),
        max_response_length=5,
        max_model_len=32,
        **common,
    )
    prompts = Batch({"group_ids": torch.arange(len(PROMPTS))}, {"prompt_ids": PROMPTS})
    share = sampling.data_shard(rank)
    samples = []
    for step in range(2):
        mine, _ = shard_rows(prompts, share)
        done = rollout.generate(mine)
        tokens = done["responses"] * done["response_mask"].long()
        samples.append(
            [
                (t.tolist(), p.tolist())
                for t, p in zip(tokens, done["rollout_log_probs"], strict=True)
            ]
        )
        actor.update(shard_rows(training_batch(ROWS, seed=step), training.data_shard(rank))[0])
    weights = rollout.policy.rollout_weights
    rollout.close()
    return {
        "samples": samples,
        "part": share.index,
        "kind": type(weights),
        "received": weights.received_bytes,
        "model": sum(p.numel() * 4 for p in actor.sharded.module.parameters()),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("rollout") / "model"))


def rows(results: list[dict[str, Any]]) -> list[Any]:
    """The ranks' samples as the controller would stack them, without padding."""
    parts = {result["part"]: result for result in reversed(results)}
    return [
        ([t for t in tokens if t], log_probs)
        for step in range(2)
        for index in sorted(parts)
        for tokens, log_probs in parts[index]["samples"][step]
    ]


CASES: list[tuple[dict[str, Any], int, type]] = [
    ({"dp": 2}, 1, SharedWeights),
    ({"tp": 2}, 2, SharedWeights),
    ({"tp": 2}, 1, ReshardedWeights),
    ({"pp": 2}, 1, ReshardedWeights),
    ({"fsdp": 2, "tp": 2}, 4, ReshardedWeights),
]


MORE: list[tuple[dict[str, Any], int, type]] = [
    ({"fsdp": 2}, 2, ReshardedWeights),
    ({"fsdp": 2, "tp": 2}, 2, ReshardedWeights),
    ({"pp": 2, "tp": 2}, 2, ReshardedWeights),
    ({"dp": 2, "fsdp": 2}, 1, ReshardedWeights),
]


@pytest.mark.parametrize(("parallel", "tp", "kind"), and_slow(CASES, MORE))
def test_ranks_sample_what_one_rank_samples(
    folder: str, alone: list[Any], parallel: dict[str, Any], tp: int, kind: type
) -> None:
    results = run_ranks(Layout(**parallel).world_size, course, folder, parallel, tp)
    assert {result["kind"] for result in results} == {kind}
    same(rows(results), alone)
    for result in results:
        assert (result["received"] > 0) == (kind is ReshardedWeights)


def courses(cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [course(folder, parallel, 1) for folder, parallel in cases]


def test_other_families_sample_what_one_rank_samples(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any]]] = []
    for family, axis in (("gemma2", "tp"), ("phi3", "tp"), ("gpt_neox", "pp")):
        path = write_tiny_folder(tmp_path / family, family=family)
        cases.append((str(path), {axis: 2}))
    [wanted] = run_ranks(1, courses, [(path, {}) for path, _ in cases])
    for number, results in enumerate(zip(*run_ranks(2, courses, cases), strict=True)):
        assert {result["kind"] for result in results} == {ReshardedWeights}
        same(rows(list(results)), rows([wanted[number]]))


@pytest.fixture(scope="module")
def alone_with_adapters(folder: str) -> list[Any]:
    return rows(run_ranks(1, course, folder, {}, 1, 4))


@pytest.mark.parametrize("lora", and_slow(["adapter"], ["merged"]))
def test_adapters_of_a_sharded_policy_are_gathered_for_rollout(
    folder: str, alone_with_adapters: list[Any], lora: str
) -> None:
    two = run_ranks(2, course, folder, {"fsdp": 2}, 1, 4, {"lora": lora})
    assert {result["kind"] for result in two} == {AdapterWeights}
    same(rows(two), alone_with_adapters)


@pytest.mark.parametrize(
    "parallel",
    and_slow([{"tp": 2}], [{"fsdp": 2}, {"dp": 2}, {"pp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}]),
    ids=str,
)
def test_ranks_decode_adapters_together(
    folder: str, alone_with_adapters: list[Any], parallel: dict[str, Any]
) -> None:
    found = run_ranks(Layout(**parallel).world_size, course, folder, parallel, 2, 4)
    assert {result["kind"] for result in found} == {MergedWeights}
    same(rows(found), alone_with_adapters)


@pytest.fixture(scope="module")
def alone(folder: str) -> list[Any]:
    return rows(run_ranks(1, course, folder, {}, 1))


def same(found: list[Any], wanted: list[Any], tolerance: float = 5e-4) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert found[: len(found) // 2] != found[len(found) // 2 :], "the update must be seen"
    for (_, ours), (tokens, theirs) in zip(found, wanted, strict=True):
        assert ours[: len(tokens)] == pytest.approx(theirs[: len(tokens)], abs=tolerance)


OPTIONS: dict[str, Any] = {"engine": "vllm", "max_num_seqs": 16, "kv_cache_memory_mb": 32}


@pytest.fixture(scope="module")
def vllm_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """vLLM on CPU has attention for heads of 32 and more."""
    vllm_folder: Path = tmp_path_factory.mktemp("vllm") / "model"
    return str(write_tiny_folder(vllm_folder, TINY_MODEL.model_copy(update={"hidden_size": 128})))


def run(
    vllm_folder: str,
    parallel: dict[str, int],
    tp: int,
    rank: int = 0,
    lora: str = "",
    **vllm: Any,
) -> Any:
    options = OPTIONS | {"vllm": vllm, "lora": lora}
    world = Layout(**parallel).world_size
    return run_ranks(world, course, vllm_folder, parallel, tp, rank, options, timeout_s=240.0)


@pytest.fixture(scope="module")
def lone_vllm(vllm_folder: str) -> list[Any]:
    return rows(run(vllm_folder, {}, 1))


needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "tp", "kind", "settings"),
    [
        ({}, 1, SharedWeights, {"sleep": 2}),
        ({"dp": 2}, 1, SharedWeights, {"sleep": 1}),
        ({"fsdp": 2}, 2, VllmWeights, {"sleep": 2}),
        ({"tp": 2}, 1, VllmWeights, {}),
        ({"pp": 2}, 1, VllmWeights, {}),
    ],
)
def test_vllm_on_ranks_samples_what_one_rank_samples(
    vllm_folder: str,
    lone_vllm: list[Any],
    parallel: dict[str, int],
    tp: int,
    kind: type,
    settings: dict[str, Any],
) -> None:
    results = run(vllm_folder, parallel, tp, **settings)
    assert {result["kind"] for result in results} == {kind}
    same(rows(results), lone_vllm)


@needs_vllm
@pytest.mark.slow
def test_adapters_of_a_policy_reach_vllm_wherever_it_is(vllm_folder: str) -> None:
    one = run(vllm_folder, {}, 1, 4)
    two = run(vllm_folder, {"fsdp": 2}, 2, 4)
    assert {result["kind"] for result in two} == {AdapterWeights}
    same(rows(two), rows(one))
    for parallel, tp in (({}, 1), ({"fsdp": 2}, 1), ({"fsdp": 2}, 2)):
        own = run(vllm_folder, parallel, tp, 4, "adapter", sleep=2)
        same(rows(own), rows(one))


SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}


EXPERTS = {"num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2}


OTHERS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "phi3": {"num_key_value_heads": 2},
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32},
}


def other_folder(family: str, vllm_folder: str, to: Path) -> str:
    """A random model of `family` with the tokenizer of `folder`."""
    tokenizer = load_tokenizer(vllm_folder)
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    values = SHAPE | OTHERS[family] | ids | {"bos_token_id": None, "pad_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values))
    return str(save_model(model, tokenizer, to))


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parallel", "tp"),
    [
        ("phi3", {"tp": 2}, 2),
        ("mixtral", {"fsdp": 2}, 1),
        ("qwen3_moe", {"fsdp": 2}, 2),
    ],
)
def test_families_with_a_layout_of_their_own_in_vllm_are_loaded_tensor_by_tensor(
    vllm_folder: str, tmp_path: Path, family: str, parallel: dict[str, int], tp: int
) -> None:
    other = other_folder(family, vllm_folder, tmp_path / family)
    found = run(other, parallel, tp)
    assert {result["kind"] for result in found} == {StreamedWeights}
    wanted = rows(run(other, {}, 1))
    same(rows(found), wanted, 5e-3)  # Adam's first step makes much of experts' rounding
    half = len(wanted) // 2
    for (_, ours), (tokens, theirs) in zip(rows(found)[:half], wanted, strict=False):
        assert ours[: len(tokens)] == pytest.approx(theirs[: len(tokens)], abs=1e-4)


@needs_vllm
@pytest.mark.slow
def test_what_vllm_computes_by_transformers_classes_is_refused_in_process(
    vllm_folder: str, tmp_path: Path
) -> None:
    other = other_folder("gpt_neox", vllm_folder, tmp_path / "gpt_neox")
    with pytest.raises(RankError, match=r"no model of its own for GPTNeoXForCausalLM.*in_process="):
        run(other, {}, 1)
    found = rows(run(other, {}, 1, in_process=False))
    model = load_model(other)
    for row, (tokens, log_probs) in enumerate(found[: len(found) // 2]):
        ids = [*PROMPTS[row // 2], *tokens]
        with torch.no_grad():
            logs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = [logs[len(ids) - len(tokens) - 1 + i, t].item() for i, t in enumerate(tokens)]
        assert log_probs[: len(tokens)] == pytest.approx(wanted, abs=1e-4)
