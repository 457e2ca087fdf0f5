"""The critic on many ranks: every layout gives values and trains as one rank does. Real gloo ranks.

Layouts over `dp`, `fsdp`, `tp` and `pp` are the actor's too: what is here is of shared sequences,
where the head reads each rank's own tokens alone, and of packed rows, which go through the body.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from thorough import and_slow
from tiny_engine import fill_value_head, save_family, training_batch

from engine.batch import Batch
from engine.config import CriticConfig, ParallelConfig
from engine.controller.worker_host import shard_rows
from engine.models import create_critic_model, load_model
from engine.parallel.layout import Layout
from engine.workers.critic import CriticWorker
from engine.workers.role import WorkerContext

ROWS, STEPS = 6, 2


def course(folder: str, parallel: dict[str, Any], lora: int = 0) -> dict[str, Any]:
    """Two updates: metrics, values before each and at the end, and the last weights, whole."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sharded = ParallelConfig.model_validate(parallel)
    layout = Layout.of(sharded)
    changes: dict[str, Any] = {
        "optim": {"lr": 1e-3 if lora else 1e-2, "grad_clip": 0.3},
        "max_tokens_per_micro_batch": 64,
    }
    changes |= {"lora": {"rank": lora}}
    worker = CriticWorker(
        WorkerContext("critic", rank, world, layout=layout),
        model_path=folder,
        config=CriticConfig.model_validate(changes),
        total_steps=STEPS,
        seed=0,
        parallel=sharded,
    )
    fill_value_head(worker.sharded)
    share = layout.data_shard(rank)
    batches = [shard_rows(training_batch(ROWS, seed=step), share)[0] for step in range(STEPS)]
    values, metrics = [worker.values(batches[0])["values"]], []
    for batch in batches:
        metrics.append(worker.update(batch))
        values.append(worker.values(batch)["values"])
    whole = {name: t.clone() for name, t in worker.sharded.full_tensors()}
    saved = set(worker.state_dict()["model"])
    return {"metrics": metrics, "values": values, "weights": whole, "share": share, "saved": saved}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_family("qwen2", tmp_path_factory.mktemp("critic")))


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[str, Any]:
    [result] = run_ranks(1, course, folder, {})
    return result


LAYOUTS: list[dict[str, Any]] = [{"sp": 2}, {"sp": 2, "packing": True}]
MORE: list[dict[str, Any]] = [
    {"sp": 2, "tp": 2, "packing": True},
    {"pp": 2, "sp": 2, "packing": True},
    {"sp": 2, "activation_checkpointing": True, "offload_params": True},
    {"fsdp": 2, "packing": True},
    {"fsdp": 2, "sp": 2},
    {"sp": 2, "tp": 2},
    {"pp": 2, "sp": 2},
]


@pytest.mark.parametrize(
    "parallel",
    and_slow(LAYOUTS, MORE),
    ids=lambda p: " ".join(f"{k}={v}" for k, v in p.items()),
)
def test_every_layout_is_as_one_rank(
    folder: str, alone: dict[str, Any], parallel: dict[str, Any]
) -> None:
    sizes = {k: v for k, v in parallel.items() if not isinstance(v, bool)}
    same_course(run_ranks(Layout(**sizes).world_size, course, folder, parallel), alone)


ADAPTED: list[dict[str, Any]] = [{"tp": 2}]
MORE_ADAPTED: list[dict[str, Any]] = [{"fsdp": 2}, {"pp": 2}, {"sp": 2}, {"fsdp": 2, "tp": 2}]


@pytest.mark.parametrize("parallel", and_slow(ADAPTED, MORE_ADAPTED), ids=str)
def test_adapters_and_the_head_are_what_is_trained(folder: str, parallel: dict[str, Any]) -> None:
    [alone] = run_ranks(1, course, folder, {}, 4)
    start = create_critic_model(load_model(folder)).state_dict()
    for name, weight in alone["weights"].items():
        trained = ".lora_" in name or name.startswith("head.")
        assert (name in alone["saved"]) == trained
        if not trained:
            assert torch.equal(weight, start[name.replace(".base_layer", "")]), name
    assert any(".lora_B." in name and weight.any() for name, weight in alone["weights"].items())
    same_course(run_ranks(Layout(**parallel).world_size, course, folder, parallel, 4), alone, 0.02)


def same_course(results: list[dict[str, Any]], alone: dict[str, Any], strays: float = 0.0) -> None:
    """`strays`: the share of a weight's elements that may be others, for rounded gradients."""
    assert alone["values"][0].abs().max() > 0.1
    for result in results:
        for step in range(STEPS):
            assert result["metrics"][step] == pytest.approx(
                alone["metrics"][step], rel=2e-4, abs=2e-5
            )
        for name, tensor in alone["weights"].items():
            # An Adam step moves a weight by up to lr = 1e-2, whatever its gradient's size.
            stray = ~torch.isclose(result["weights"][name], tensor, rtol=1e-4, atol=1e-4)
            assert int(stray.sum()) <= strays * tensor.numel(), name
        for index, values in enumerate(alone["values"]):
            wanted = shard_rows(Batch({"values": values}), result["share"])[0]["values"]
            close = 1e-5 if index == 0 else 5e-4  # weights have moved
            torch.testing.assert_close(result["values"][index], wanted, rtol=1e-4, atol=close)
