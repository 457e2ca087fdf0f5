"""Ranks whose rows differ in length run different numbers of micro-batches, and none waits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from thorough import and_slow
from tiny_engine import completions_batch, fill_value_head, save_family
from torch import Tensor

from engine.batch import Batch
from engine.config import ActorConfig, CriticConfig
from engine.parallel.layout import Layout
from engine.runtime.sharded_model import micro_batches
from engine.workers.actor import ActorWorker
from engine.workers.critic import CriticWorker
from engine.workers.frozen_models import ReferenceWorker
from engine.workers.role import ProcessState, WorkerContext

BUDGET = 64  # tokens a micro-batch
PASSES = (2, 6)  # micro-batches by rank


def rows(data_rank: int) -> Batch:
    """Six completions, short or long."""
    length = (6, 20)[data_rank]
    prompts = [[5 + i] * length for i in range(6)]
    responses = [[40 + i] * length for i in range(6)]
    return completions_batch(prompts, responses)


def course(folder: str, sizes: dict[str, int]) -> list[tuple[int, dict[str, Tensor]]]:
    """The passes of one rank's rows, and what each role gives for them twice; alone: of both."""
    rank = dist.get_rank() if sizes else 0
    world = Layout(**sizes).world_size
    config = ActorConfig.model_validate({"parallel": sizes, "max_tokens_per_micro_batch": BUDGET})
    layout = Layout.of(config.parallel)
    process = ProcessState()

    def context(role: str) -> WorkerContext:
        return WorkerContext(role, rank, world, process, layout)

    actor = ActorWorker(
        context("actor"), model_path=folder, config=config, temperature=0.8, total_steps=1, seed=0
    )
    reference = ReferenceWorker(
        context("reference"),
        model_path=folder,
        temperature=1.3,
        max_tokens_per_micro_batch=BUDGET,
        parallel=config.parallel,
    )
    asked = [actor.log_probs, reference.log_probs]
    if config.parallel.pp == 1:
        asked.append(reference.full_kl)
    critic = CriticWorker(
        context("critic"),
        model_path=folder,
        config=CriticConfig.model_validate({"max_tokens_per_micro_batch": BUDGET}),
        total_steps=1,
        seed=0,
        parallel=config.parallel,
    )
    fill_value_head(critic.sharded)
    asked.append(critic.values)
    found = []
    for part in [layout.data_shard(rank).index] if sizes else range(2):
        batch = rows(part)
        given: dict[str, Tensor] = {}
        for _ in range(2):
            for method in asked:
                given |= method(batch).as_dict()
        found.append((len(list(micro_batches(batch, BUDGET))), given))
    return found


@pytest.mark.parametrize(
    "sizes", and_slow([{"fsdp": 2}], [{"fsdp": 2, "pp": 2}, {"fsdp": 2, "sp": 2}]), ids=str
)
def test_ranks_with_more_passes_than_others_end(
    tmp_path_factory: pytest.TempPathFactory, sizes: dict[str, int]
) -> None:
    folder = str(save_family("qwen2", tmp_path_factory.mktemp("model")))
    wanted = course(folder, {})
    assert tuple(count for count, _ in wanted) == PASSES
    world = Layout(**sizes).world_size
    seen = set()
    for [(count, given)] in run_ranks(world, course, folder, sizes, timeout_s=45.0):
        part = PASSES.index(count)
        seen.add(part)
        for name, value in given.items():
            torch.testing.assert_close(value, wanted[part][1][name], rtol=1e-4, atol=1e-5, msg=name)
    assert seen == {0, 1}
