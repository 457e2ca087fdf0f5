"""Pairs on many ranks: a step of online DPO moves the weights as one rank does. Real gloo ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from thorough import and_slow
from tiny_engine import save_family, training_batch

from engine.batch import Batch
from engine.config import ActorConfig
from engine.controller.worker_host import (
    BatchArgument,
    RemoteCall,
    RoleSpec,
    WorkerHost,
    merge_results,
)
from engine.parallel.layout import Layout
from engine.workers.actor import ActorWorker
from engine.workers.frozen_models import ReferenceWorker

STEPS = 2


def course(folder: str, parallel: dict[str, int], pairs: int) -> dict[str, Any]:
    """Steps on `pairs` pairs each: what the controller gets, and the weights at the end, whole."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = ActorConfig.model_validate(
        {
            "use_kl_loss": False,
            "optim": {"lr": 1e-2, "grad_clip": 0.3, "warmup_ratio": 0.0},
            "max_tokens_per_micro_batch": 64,
            "parallel": parallel,
        }
    )
    layout = Layout.of(config.parallel)
    actor = {"config": config, "temperature": 0.8, "total_steps": STEPS, "seed": 0}
    reference = {
        "temperature": 1.3,  # not the actor's: equal log-probs would leave metrics to rounding
        "max_tokens_per_micro_batch": 64,
        "parallel": config.parallel,
    }
    host = WorkerHost(
        [
            RoleSpec("actor", ActorWorker, {"model_path": folder, **actor}, layout),
            RoleSpec("reference", ReferenceWorker, {"model_path": folder, **reference}, layout),
        ],
        rank,
        world,
        threads=1,
    )
    host.build()

    def call(role: str, method: str, batch: Batch) -> Any:
        every: list[Any] = [None] * world
        dist.all_gather_object(
            every, host.call(RemoteCall(role, method, (BatchArgument((1,)),)), batch)
        )
        return merge_results([result for result in every if result is not None])

    metrics = []
    for step in range(STEPS):
        batch = training_batch(2 * pairs, seed=step)
        batch |= call("reference", "log_probs", batch)
        metrics.append(call("actor", "update_pairs", batch))
    trained = host.workers["actor"]
    assert isinstance(trained, ActorWorker)
    weights = {name: tensor.clone() for name, tensor in trained.sharded.full_tensors()}
    return {"metrics": metrics, "weights": weights}


@pytest.mark.parametrize(
    ("parallel", "pairs"),
    and_slow(
        [({"dp": 2}, 3), ({"fsdp": 2}, 1)],
        [
            ({"dp": 2}, 1),
            ({"fsdp": 2}, 3),
            *product([{"dp": 2, "pp": 2}, {"dp": 2, "tp": 2}, {"fsdp": 4}], [3, 1]),
        ],
    ),
    ids=str,
)
def test_pairs_train_as_on_one_rank(
    tmp_path_factory: pytest.TempPathFactory, parallel: dict[str, int], pairs: int
) -> None:
    """Neither parted pairs nor padding: the loss is the mean over the real pairs of all ranks."""
    folder = str(save_family("qwen2", tmp_path_factory.mktemp("pairs")))
    [alone] = run_ranks(1, course, folder, {}, pairs)
    for result in run_ranks(Layout(**parallel).world_size, course, folder, parallel, pairs):
        for step, wanted in enumerate(alone["metrics"]):
            assert result["metrics"][step] == pytest.approx(wanted, rel=2e-4, abs=2e-5)
        for name, tensor in alone["weights"].items():
            # A step of Adam moves a weight by lr=1e-2, however small its gradient is.
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-4, atol=5e-4)
