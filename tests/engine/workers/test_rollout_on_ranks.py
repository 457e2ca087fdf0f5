"""Rollout on many ranks, whatever layout trains: it samples what one rank samples. Gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from thorough import and_slow
from tiny_engine import training_batch, write_tiny_folder

from engine.batch import Batch
from engine.config import ActorConfig, LoRAConfig, RolloutConfig
from engine.controller.worker_host import shard_rows
from engine.parallel.layout import Layout, rollout_layout
from engine.runtime.rollout_weights import (
    AdapterWeights,
    MergedWeights,
    ReshardedWeights,
    SharedWeights,
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


def test_adapters_of_a_sharded_policy_are_gathered_for_rollout(
    folder: str, alone_with_adapters: list[Any]
) -> None:
    two = run_ranks(2, course, folder, {"fsdp": 2}, 1, 4)
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
