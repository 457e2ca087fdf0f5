"""Critic, reference and rollout, each by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import arithmetic_rows, save_family, training_batch

from engine.batch import Batch
from engine.config import ActorConfig, CriticConfig, RolloutConfig
from engine.data.collate import collate_prompts
from engine.data.templates import encode_prompt
from engine.data.tokenizer import load_tokenizer
from engine.workers.actor import ActorWorker
from engine.workers.critic import CriticWorker
from engine.workers.frozen_models import ReferenceWorker
from engine.workers.role import ProcessState, WorkerContext
from engine.workers.rollout_worker import RolloutWorker

pytestmark = pytest.mark.usefixtures("one_thread")


def critic(folder: Path, **changes: Any) -> CriticWorker:
    config = CriticConfig.model_validate({"optim": {"lr": 1e-2}} | changes)
    return CriticWorker(
        WorkerContext("critic"), model_path=str(folder), config=config, total_steps=50, seed=0
    )


def policy(folder: Path, **rollout: Any) -> tuple[ActorWorker, RolloutWorker]:
    process = ProcessState()
    actor = ActorWorker(
        WorkerContext("actor", process=process),
        model_path=str(folder),
        config=ActorConfig(use_kl_loss=False),
        temperature=rollout.get("temperature", 1.0),
        total_steps=10,
        seed=0,
    )
    engine = RolloutWorker(
        WorkerContext("rollout", process=process),
        model_path=str(folder),
        config=RolloutConfig.model_validate({"n": 4} | rollout),
        max_response_length=6,
        max_model_len=40,
        seed=0,
    )
    return actor, engine


def prompts(folder: Path, count: int = 3) -> Batch:
    tokenizer, rows = load_tokenizer(folder), arithmetic_rows(count)
    return collate_prompts(rows, [encode_prompt(tokenizer, row["prompt"]) for row in rows])


def test_critic_fits_its_returns(tmp_path: Path) -> None:
    worker, batch = critic(save_family("qwen2", tmp_path), cliprange_value=100.0), training_batch(6)
    start = worker.values(batch)["values"]
    assert start.eq(0).all(), "a new critic predicts 0"

    def error() -> float:
        mask = batch["response_mask"]
        off = (worker.values(batch)["values"] - batch["returns"]) * mask
        return float(off.square().sum() / mask.sum())

    before = error()
    for _ in range(20):
        metrics = worker.update(batch)
    assert error() < before / 3
    assert {"critic/grad_norm", "critic/vpred_mean", "critic/vf_clipfrac"} <= metrics.keys()
    assert (worker.values(batch)["values"][~batch["response_mask"].bool()] == 0).all()


def test_critic_update_doesn_t_depend_on_micro_batches(tmp_path: Path) -> None:
    """Gradients and metrics: AdamW would blow up the noise of weights with hardly a gradient."""
    folder, batch = save_family("llama", tmp_path), training_batch(10)
    results = []
    for budget in (64, 10_000):
        worker = critic(folder, max_tokens_per_micro_batch=budget)
        with torch.no_grad():
            worker.sharded.module.head.weight.copy_(torch.linspace(-1.0, 1.0, 32)[None])
        worker._accumulate(batch)
        gradients = {name: p.grad.clone() for name, p in worker.sharded.module.named_parameters()}
        results.append((gradients, worker.update(batch)))
    (few, facts), (one, same) = results
    for name, gradient in few.items():
        torch.testing.assert_close(gradient, one[name], rtol=1e-3, atol=1e-5)
    assert float(few["head.weight"].abs().max()) > 1e-2
    assert facts == pytest.approx(same, rel=1e-3, abs=1e-4)


def test_reference_is_the_frozen_start(tmp_path: Path) -> None:
    folder = save_family("qwen2", tmp_path)
    actor, _ = policy_of(folder)
    options = {"temperature": 0.7, "max_tokens_per_micro_batch": 64}
    worker = ReferenceWorker(WorkerContext("reference"), model_path=str(folder), **options)  # type: ignore[arg-type]
    actor.temperature = 0.7
    batch = training_batch(6)
    first = worker.log_probs(batch)["ref_log_probs"]
    own = actor.log_probs(batch)["old_log_probs"]
    torch.testing.assert_close(first, own, atol=1e-5, rtol=0)
    actor.update(batch)
    assert torch.equal(worker.log_probs(batch)["ref_log_probs"], first)
    assert not any(p.requires_grad for p in worker.sharded.module.parameters())


def policy_of(folder: Path) -> tuple[ActorWorker, None]:
    actor = ActorWorker(
        WorkerContext("actor"),
        model_path=str(folder),
        config=ActorConfig(use_kl_loss=False),
        temperature=1.0,
        total_steps=10,
        seed=0,
    )
    return actor, None


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rollout_log_probs_are_the_actor_s(tiny_folder: Path, temperature: float) -> None:
    actor, rollout = policy(tiny_folder, temperature=temperature)
    batch = rollout.generate(prompts(tiny_folder))
    assert len(batch) == 12
    assert batch["group_ids"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert list(batch.columns["ground_truth"][::4]) == ["0", "2", "4"]
    own = actor.log_probs(batch)["old_log_probs"]
    torch.testing.assert_close(own, batch["rollout_log_probs"], atol=5e-5, rtol=0)
    lengths = batch["response_mask"].sum(1)
    assert lengths.max() <= 6
    ends = (
        batch["responses"][torch.arange(12), lengths.long() - 1] == rollout.tokenizer.eos_token_id
    )
    assert torch.equal(batch["truncated"], ~ends)


def test_rollout_follows_the_policy_and_says_its_version(tiny_folder: Path) -> None:
    actor, rollout = policy(tiny_folder)
    first = rollout.generate(prompts(tiny_folder))
    again = policy(tiny_folder)[1].generate(prompts(tiny_folder))
    assert torch.equal(first["responses"], again["responses"])
    another = rollout.generate(prompts(tiny_folder))
    assert not torch.equal(first["input_ids"], another["input_ids"]), "fresh draws, same weights"
    advantages = torch.randn(first["responses"].shape, generator=torch.Generator().manual_seed(0))
    actor.update(first | {"advantages": advantages * first["response_mask"]})
    second = rollout.generate(prompts(tiny_folder))
    assert first["policy_version"].unique().tolist() == [0]
    assert second["policy_version"].unique().tolist() == [1]
    torch.testing.assert_close(
        actor.log_probs(second)["old_log_probs"], second["rollout_log_probs"], atol=5e-5, rtol=0
    )


def test_validation_samples_as_told_and_leaves_trainings_draws_as_they_are(
    tiny_folder: Path,
) -> None:
    how = {"val_kwargs": {"do_sample": True, "n": 2, "temperature": 0.7}}
    alone = policy(tiny_folder)[1].generate(prompts(tiny_folder))
    _, rollout = policy(tiny_folder, **how)
    first, second = (rollout.generate_validation(prompts(tiny_folder)) for _ in range(2))
    assert first["group_ids"].tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal(first["responses"], second["responses"]), "comparable between steps"
    assert not torch.equal(first["responses"][0], first["responses"][1])
    trained = rollout.generate(prompts(tiny_folder))
    assert torch.equal(alone["responses"], trained["responses"])
    greedy = policy(tiny_folder)[1].generate_validation(prompts(tiny_folder))
    assert len(greedy) == 3


def test_greedy_is_one_completion_a_prompt_and_repeats(tiny_folder: Path) -> None:
    _, rollout = policy(tiny_folder, top_k=2, top_p=0.5)
    first, second = (rollout.generate_greedy(prompts(tiny_folder)) for _ in range(2))
    assert len(first) == 3
    assert torch.equal(first["responses"], second["responses"])
