"""Rows that share prompts, computed as one sequence: every role's gradient is the padded rows'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from thorough import and_slow
from tiny_engine import (
    branches_batch,
    fill_value_head,
    save_family,
    shared_prompts_batch,
    tiny_model,
)
from torch import Tensor, nn

from engine.algorithms import policy_losses
from engine.algorithms.preference_losses import get_pair_loss
from engine.batch import Batch
from engine.config import ActorConfig, CriticConfig, LoRAConfig, ParallelConfig
from engine.controller.worker_host import shard_rows
from engine.models.forward import LogProbReader
from engine.parallel.layout import Layout
from engine.parallel.process_groups import Ranks
from engine.runtime.sharded_model import ShardedModel
from engine.workers.actor import ActorWorker
from engine.workers.critic import CriticWorker
from engine.workers.role import WorkerContext

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("qwen2", tmp_path_factory.mktemp("packed"))


def actor(folder: Path, packing: Any, lora: int = 0, **changes: Any) -> ActorWorker:
    terms = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
    parallel = {"parallel": {"packing": packing}}
    worker = ActorWorker(
        WorkerContext("actor"),
        model_path=str(folder),
        config=ActorConfig.model_validate(terms | parallel | changes),
        temperature=0.8,
        total_steps=1,
        seed=0,
        lora=LoRAConfig(rank=lora),
    )
    for name, parameter in worker.sharded.module.named_parameters():
        if ".lora_B." in name:
            nn.init.constant_(parameter, 0.05)
    return worker


def embedded(module: Any) -> list[int]:
    """Filled with how many positions each pass over `module` computes."""
    seen: list[int] = []
    module.base_model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: seen.append(args[0].numel())
    )
    return seen


def flat_gradient(module: nn.Module) -> Tensor:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return torch.cat([g.flatten().double() for g in grads])


def assert_same(packed: Tensor, padded: Tensor) -> None:
    assert padded.norm() > 1e-3
    assert (packed - padded).norm() < 1e-5 * padded.norm()


def actor_gradient(worker: ActorWorker, batch: Batch) -> tuple[Tensor, int]:
    """The gradient of a mini-batch, and how many positions its passes computed."""
    assert worker.log_probs(batch)["old_log_probs"].abs().max() > 1  # checks packing, too
    seen = embedded(worker.sharded.module)
    worker._accumulate(batch)
    return flat_gradient(worker.sharded.module), sum(seen)


@pytest.mark.parametrize("loss", policy_losses.names())
def test_every_policy_loss_has_the_padded_rows_gradient(folder: Path, loss: str) -> None:
    batch = shared_prompts_batch()
    batch |= policy_losses.prepare(
        loss, batch["old_log_probs"], batch["advantages"], batch["response_mask"]
    )
    terms = {"policy_loss": {"loss_mode": loss}}
    padded, positions = actor_gradient(actor(folder, False, **terms), batch)
    packed, tokens = actor_gradient(actor(folder, True, **terms), batch)
    assert_same(packed, padded)
    assert tokens < 0.8 * positions


@pytest.mark.parametrize(
    "changes",
    [{"max_tokens_per_micro_batch": 64}, {"lora": 3}, {"kl_loss_type": "full"}],
    ids=lambda changes: next(iter(changes)),
)
def test_so_it_has_with(folder: Path, changes: dict[str, Any]) -> None:
    batch, grads = shared_prompts_batch((4, 1, 5, 3, 6)), []
    for packing in (False, True):
        worker = actor(folder, packing, **changes)
        if changes.get("kl_loss_type") == "full":
            config = ParallelConfig(packing=packing)
            reference = ShardedModel(tiny_model("qwen2", seed=1), Ranks(Layout()), config)
            worker.context.process.reference = reference
        grads.append(actor_gradient(worker, batch)[0])
    assert_same(grads[1], grads[0])


@pytest.mark.parametrize("budget", [90, 10_000])
def test_branches_of_episodes_have_the_padded_rows_gradient(folder: Path, budget: int) -> None:
    changes = {"max_tokens_per_micro_batch": budget}
    batch = branches_batch()
    padded, positions = actor_gradient(actor(folder, False, **changes), batch)
    packed, tokens = actor_gradient(actor(folder, "auto", **changes), batch)
    assert_same(packed, padded)
    assert tokens < (0.45 if budget > 90 else 0.8) * positions


def test_pairs_have_the_padded_rows_gradient(folder: Path) -> None:
    batch, grads = shared_prompts_batch((2, 2, 4)).rows(range(2, 8)), []
    for packing in (False, True):
        worker = actor(folder, packing, max_tokens_per_micro_batch=10_000)
        sigmoid, reader = get_pair_loss("sigmoid"), LogProbReader(1.0)
        seen = embedded(worker.sharded.module)
        worker.accumulate_pairs(batch, sigmoid, reader)
        grads.append(flat_gradient(worker.sharded.module))
    assert seen[-1] < batch["attention_mask"].sum() - 6  # one a row, and shared prompts
    assert_same(grads[1], grads[0])


@pytest.mark.parametrize("budget", [64, 10_000])
def test_a_critic_has_the_padded_rows_values_and_gradient(folder: Path, budget: int) -> None:
    batch, results = shared_prompts_batch(), []
    for packing in (False, True):
        worker = CriticWorker(
            WorkerContext("critic"),
            model_path=str(folder),
            config=CriticConfig(max_tokens_per_micro_batch=budget),
            total_steps=1,
            seed=0,
            parallel=ParallelConfig(packing=packing),
        )
        fill_value_head(worker.sharded)
        values = worker.values(batch)["values"]
        worker._accumulate(batch)
        results.append((values, flat_gradient(worker.sharded.module)))
    (wanted, padded), (values, packed) = results
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)
    assert_same(packed, padded)


def gradients_on_ranks(folder: str, layout: Layout, packing: bool) -> dict[str, Tensor]:
    """Of this rank's rows, whole."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    sizes = {"dp": layout.dp, "fsdp": layout.fsdp, "tp": layout.tp, "sp": layout.sp}
    parallel = sizes | {"packing": packing if layout.sp == 1 else "auto"}
    worker = ActorWorker(
        WorkerContext("actor", rank, layout.world_size, layout=layout),
        model_path=folder,
        config=ActorConfig.model_validate(
            {"parallel": parallel, "max_tokens_per_micro_batch": 64, "kl_loss_coef": 0.1}
            | {"optim": {"lr": 1e-2, "warmup_ratio": 0.0}}
        ),
        temperature=0.8,
        total_steps=1,
        seed=0,
    )
    batch = shared_prompts_batch((4, 1, 5, 3, 5))
    mine, _ = shard_rows(batch, layout.data_shard(rank))
    log_probs = worker.log_probs(mine)["old_log_probs"]
    worker.update(mine)
    return {"log_probs": log_probs} | {n: t.clone() for n, t in worker.sharded.full_tensors()}


@pytest.mark.parametrize(
    "layout",
    and_slow([Layout(dp=2), Layout(tp=2), Layout(fsdp=2)], [Layout(sp=2), Layout(fsdp=2, tp=2)]),
    ids=str,
)
def test_ranks_step_as_one_does_on_padded_rows(folder: Path, layout: Layout) -> None:
    wanted = gradients_on_ranks(str(folder), Layout(), False)
    every = wanted.pop("log_probs")
    results = run_ranks(layout.world_size, gradients_on_ranks, str(folder), layout, True)
    for rank, result in enumerate(results):
        share, found = layout.data_shard(rank), result.pop("log_probs")
        mine = shard_rows(Batch({"old_log_probs": every}), share)[0]["old_log_probs"]
        torch.testing.assert_close(found, mine, rtol=1e-4, atol=1e-5)
        for name, tensor in wanted.items():
            # Adam's step is lr = 1e-2 where the gradient is all rounding, too (a key's bias).
            torch.testing.assert_close(result[name], tensor, rtol=1e-4, atol=1e-3)
