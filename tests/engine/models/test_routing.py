"""Routers' choices: how evenly they fall, recorded, and repeated whatever a router would choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import save_family, shared_prompts_batch, tiny_model, training_batch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from engine.batch import Batch
from engine.config import ActorConfig, ParallelConfig
from engine.models.forward import LogProbReader
from engine.models.routing import routers
from engine.parallel.layout import Layout
from engine.parallel.process_groups import Ranks
from engine.runtime.sharded_model import ShardedModel, untrimmed
from engine.workers.actor import ActorWorker
from engine.workers.role import WorkerContext

FAMILIES = ("qwen3_moe", "mixtral")


def sharded(family: str, packing: bool = False) -> ShardedModel:
    return ShardedModel(tiny_model(family), Ranks(Layout()), ParallelConfig(packing=packing))


def outputs(model: ShardedModel, batch: Batch, tokens: int = 64, **asked: Any) -> dict[str, Tensor]:
    passes = model.micro_batches(batch, tokens)
    return model.outputs(batch, passes, LogProbReader(1.0, **asked))


def recorded(model: ShardedModel, batch: Batch) -> Tensor:
    chosen: list[Tensor] = []
    passes = model.micro_batches(batch, 64)
    model.outputs(batch, passes, LogProbReader(1.0, record=chosen.append))
    return untrimmed(batch, passes, chosen)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_balance_is_transformers_loss_over_response_tokens(family: str) -> None:
    model, batch = sharded(family), shared_prompts_batch().rows([4])
    ids = batch["input_ids"][batch["attention_mask"].bool()][None]
    prompt = int(batch["attention_mask"][0, : batch["prompts"].shape[1]].sum())
    found: Any = model.module(input_ids=ids[:, :-1], output_router_logits=True)  # type: ignore[operator]
    logits = tuple(layer[prompt - 1 :] for layer in found.router_logits)
    config: Any = model.module.config
    experts, each = logits[0].shape[1], config.num_experts_per_tok
    wanted: Any = load_balancing_loss_func(logits, experts, each)
    got = outputs(model, batch, router_balance=True)["router_balance"]
    assert float(got.sum() / batch["response_mask"].sum()) == pytest.approx(wanted.item(), rel=1e-5)
    packed = outputs(sharded(family, packing=True), batch, router_balance=True)["router_balance"]
    torch.testing.assert_close(packed, got)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_routers_repeat_what_a_batch_says(family: str, packing: bool) -> None:
    model, batch = sharded(family, packing), shared_prompts_batch()
    before, chosen = outputs(model, batch)["log_probs"], recorded(model, batch)
    assert torch.equal(chosen, recorded(sharded(family, not packing), batch))
    real = batch["attention_mask"].bool()
    assert not chosen[~real].any()
    with torch.no_grad():
        for router in routers(model.module):  # would choose others now
            router.weight.neg_()  # type: ignore[operator, union-attr]
    free = recorded(model, batch)
    assert (free != chosen).float().mean() > 0.2
    told = batch | {"routed_experts": chosen}
    again: list[Tensor] = []
    passes = model.micro_batches(told, 32)  # other micro-batches
    reader = LogProbReader(1.0, replay=True, record=again.append)
    moved = model.outputs(told, passes, reader)["log_probs"]
    assert torch.equal(untrimmed(told, passes, again), chosen)
    assert float((moved - outputs(model, batch)["log_probs"]).abs().max()) > 0.01
    with torch.no_grad():
        for router in routers(model.module):
            router.weight.neg_()  # type: ignore[operator, union-attr]
    torch.testing.assert_close(outputs(model, told, replay=True)["log_probs"], before)


def actor(folder: Path, **values: Any) -> ActorWorker:
    config = {"use_kl_loss": False, "max_tokens_per_micro_batch": 64} | values
    return ActorWorker(
        WorkerContext("actor"),
        model_path=str(folder),
        config=ActorConfig.model_validate(config),
        temperature=1.0,
        total_steps=4,
        seed=0,
    )


def test_r2_updates_with_the_experts_of_the_pass_before(tmp_path: Path) -> None:
    folder, batch = save_family("qwen3_moe", tmp_path), training_batch(8)
    replayed, free = (
        actor(folder, router_replay={"mode": mode}, optim={"lr": 0.1}, ppo_epochs=2)
        for mode in ("R2", "disabled")
    )
    told = batch | replayed.log_probs(batch)
    assert "routed_experts" in told
    assert "routed_experts" not in free.log_probs(batch)
    # The first epoch moves routers far; the second is asked for the first's experts or its own.
    assert replayed.update(told) != free.update(told)
    passes = replayed.sharded.micro_batches(told, 64)
    again: list[Tensor] = []
    reader = LogProbReader(1.0, replay=True, record=again.append)
    replayed.sharded.outputs(told, passes, reader)
    assert torch.equal(untrimmed(told, passes, again), told["routed_experts"])
    before = routers(actor(folder).sharded.module)[0].weight
    assert not torch.equal(routers(replayed.sharded.module)[0].weight, before)  # type: ignore[arg-type]


def test_the_balancing_loss_evens_the_load(tmp_path: Path) -> None:
    folder, batch = save_family("mixtral", tmp_path), training_batch(8)
    batch = batch | {"advantages": torch.zeros_like(batch["advantages"])}
    one = actor(folder, router_aux_loss_coef=1.0, optim={"lr": 3e-3, "weight_decay": 0.0})
    losses = [one.update(batch)["actor/router_aux_loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.05
    still = actor(folder, optim={"lr": 3e-3, "weight_decay": 0.0})
    assert "actor/router_aux_loss" not in still.update(batch)
