"""Distillation on many ranks moves the weights as one rank does. Real gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from thorough import and_slow
from tiny_engine import save_family, tiny_model, training_batch

from engine.batch import Batch
from engine.config import ActorConfig, DistillationConfig, TeacherConfig
from engine.controller.worker_host import (
    BatchArgument,
    RemoteCall,
    RoleSpec,
    WorkerHost,
    merge_results,
)
from engine.parallel.layout import Layout
from engine.workers.actor import ActorWorker
from engine.workers.frozen_models import TeacherWorker

STEPS = 2


def course(folder: str, teachers: list[str], parallel: dict[str, int], top_k: int) -> Any:
    """Steps with a teacher for each half of the rows: metrics, and the weights at the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = ActorConfig.model_validate(
        {
            "use_kl_loss": False,
            "optim": {"lr": 1e-2, "grad_clip": 0.3, "warmup_ratio": 0.0},
            "max_tokens_per_micro_batch": 64,
            "parallel": parallel,
        }
    )
    given = [TeacherConfig(model=one, rows=name) for one, name in zip(teachers, "ab", strict=True)]
    own = {"loss": "jsd", "top_k": top_k, "teachers": given, "route_by": "side"}
    settings, layout = DistillationConfig.model_validate(own), Layout.of(config.parallel)
    actor = {"config": config, "temperature": 0.8, "total_steps": STEPS, "seed": 0}
    teacher = {
        "teachers": given,
        "settings": settings,
        "temperature": 0.8,
        "max_tokens_per_micro_batch": 64,
        "parallel": config.parallel,
    }
    same = {"model_path": folder}
    host = WorkerHost(
        [
            RoleSpec("actor", ActorWorker, same | actor | {"distillation": settings}, layout),
            RoleSpec("teacher", TeacherWorker, same | teacher, layout),
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
        batch = training_batch(6, seed=step)
        batch |= {"teacher_weights": torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(3, 1)}
        if top_k:
            batch |= call("teacher", "top_k", batch)
        metrics.append(call("actor", "update_distilled", batch))
    trained = host.workers["actor"]
    assert isinstance(trained, ActorWorker)
    weights = {name: tensor.clone() for name, tensor in trained.sharded.full_tensors()}
    return {"metrics": metrics, "weights": weights}


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize(
    "parallel", and_slow([{"fsdp": 2}], [{"dp": 2}, {"sp": 2}, {"fsdp": 2, "sp": 2}]), ids=str
)
def test_students_learn_as_on_one_rank(
    tmp_path_factory: pytest.TempPathFactory, parallel: dict[str, int], top_k: int
) -> None:
    root = tmp_path_factory.mktemp("distillation")
    folder = str(save_family("qwen2", root / "student"))
    teachers = [str(root / name) for name in ("a", "b")]
    for seed, one in enumerate(teachers, 1):
        tiny_model("qwen2", seed).save_pretrained(one)
    [alone] = run_ranks(1, course, folder, teachers, {}, top_k)
    assert all(metrics["actor/divergence"] > 0.1 for metrics in alone["metrics"])
    ranks = Layout(**parallel).world_size
    for result in run_ranks(ranks, course, folder, teachers, parallel, top_k):
        for step, wanted in enumerate(alone["metrics"]):
            assert result["metrics"][step] == pytest.approx(wanted, rel=2e-4, abs=2e-5)
        for name, tensor in alone["weights"].items():
            # A step of Adam moves a weight by lr=1e-2, however small its gradient is.
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-4, atol=5e-4)
