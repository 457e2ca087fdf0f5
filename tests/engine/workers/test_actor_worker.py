"""The actor: one update doesn't depend on how it is cut, and each term moves the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import save_family, training_batch
from torch import Tensor

from engine.batch import Batch
from engine.config import ActorConfig
from engine.models import load_model
from engine.workers.actor import ActorWorker
from engine.workers.base import WorkerContext

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("qwen2", tmp_path_factory.mktemp("actor"))


def actor(folder: Path, steps: int = 10, **changes: Any) -> ActorWorker:
    config = ActorConfig.model_validate({"use_kl_loss": False, "optim": {"lr": 1e-3}} | changes)
    return ActorWorker(
        WorkerContext("actor"),
        model_path=str(folder),
        config=config,
        temperature=1.0,
        total_steps=steps,
        seed=0,
    )


def weights(worker: ActorWorker) -> Tensor:
    return torch.cat([p.detach().flatten() for p in worker.model.parameters()])


def updated(folder: Path, batch: Batch, **changes: Any) -> tuple[Tensor, dict[str, float]]:
    worker = actor(folder, **changes)
    metrics = worker.update(batch)
    return weights(worker), metrics


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "geo_mean"])
@pytest.mark.parametrize("mode", [None, "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_update_doesn_t_depend_on_micro_batches(folder: Path, loss: str, mode: str | None) -> None:
    if loss != "vanilla" and mode == "seq-mean-token-sum-norm":
        mode = None
    terms = {
        "policy_loss": {"loss_mode": loss},
        "loss_agg_mode": mode,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "entropy_coeff": 0.01,
    }
    if loss == "gspo":
        terms["loss_agg_mode"] = None
    batch = training_batch(12)
    whole, facts = updated(folder, batch, max_tokens_per_micro_batch=10_000, **terms)
    parts, same = updated(folder, batch, max_tokens_per_micro_batch=64, **terms)
    # Adam turns rounding in tiny gradients into steps: nearly all weights agree closely.
    difference = (whole - parts).abs()
    assert difference.quantile(0.99) < 1e-6
    assert difference.max() < 1e-4
    assert facts.keys() == same.keys()
    for name, value in facts.items():
        assert same[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_on_policy_the_ratio_is_one(folder: Path) -> None:
    worker = actor(folder)
    batch = training_batch(8)
    own = worker.log_probs(batch)
    metrics = worker.update(batch | own)
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert not torch.allclose(worker.log_probs(batch)["old_log_probs"], own["old_log_probs"])


def test_rollout_log_probs_stand_in_for_old_ones(folder: Path) -> None:
    batch = training_batch(8)
    names = [n for n in batch.names if n != "old_log_probs"]
    without = batch.select(names) | {"rollout_log_probs": batch["old_log_probs"]}
    assert torch.equal(updated(folder, without)[0], updated(folder, batch)[0])


def test_dropout_is_off_in_the_update(tmp_path: Path) -> None:
    folder = save_family("gpt2", tmp_path)
    assert load_model(folder).config.resid_pdrop > 0
    worker, batch = actor(folder), training_batch(6)
    first, second = worker.log_probs(batch), worker.log_probs(batch)
    assert torch.equal(first["old_log_probs"], second["old_log_probs"])
    assert worker.update(batch | first)["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("term", "metric", "sign"),
    [
        ({"entropy_coeff": 0.5}, "actor/entropy", 1),
        ({"use_kl_loss": True, "kl_loss_coef": 0.5}, "actor/kl", -1),
    ],
)
def test_a_term_moves_what_it_is_about(
    folder: Path, term: dict[str, Any], metric: str, sign: int
) -> None:
    batch = training_batch(8)
    batch = batch | {"advantages": torch.zeros_like(batch["advantages"])}

    def course(**changes: Any) -> tuple[float, float]:
        worker = actor(folder, optim={"lr": 3e-3, "weight_decay": 0.0}, **changes)
        values = [worker.update(batch)[metric] for _ in range(4)]
        return values[0], values[-1]

    before, after = course()
    assert before == after, "zero advantages and no terms must change nothing"
    start, end = course(**term)
    assert start == before
    assert (end - start) * sign > 0.01


def test_advantages_push_probabilities_their_way(folder: Path) -> None:
    batch = training_batch(8)
    for sign in (1.0, -1.0):
        worker = actor(folder)
        before = worker.log_probs(batch)["old_log_probs"]
        advantages = sign * batch["response_mask"]
        worker.update(batch | {"advantages": advantages, "old_log_probs": before})
        after = worker.log_probs(batch)["old_log_probs"]
        assert float((after - before).sum()) * sign > 0


def test_steps_versions_and_learning_rates(folder: Path) -> None:
    worker = actor(
        folder,
        steps=6,
        ppo_mini_batch_size=4,
        ppo_epochs=2,
        optim={"lr": 0.1, "schedule": "linear", "min_lr_ratio": 0.0, "warmup_ratio": 0.0},
    )
    taken = []
    real = worker.optimizer.step
    worker.optimizer.step = lambda: taken.append(1) or real()  # type: ignore[method-assign]
    shared = worker.context.shared
    assert shared["policy"] is worker.model
    assert shared["policy_version"] == 0
    metrics = worker.update(training_batch(10))
    assert len(taken) == 2 * 3  # epochs × mini-batches of 4, 4 and 2 rows
    assert shared["policy_version"] == 1
    assert metrics["actor/lr"] == pytest.approx(0.1 / 6)  # that of the sixth of six steps


def test_batches_without_padding_tokens_in_the_loss(folder: Path) -> None:
    """What lies outside the mask must not matter, whatever it is."""
    batch = training_batch(8)
    outside = ~batch["response_mask"].bool()
    noise = {
        name: torch.where(outside, torch.tensor(77.0), batch[name])
        for name in ("advantages", "old_log_probs", "ref_log_probs")
    }
    clean, _ = updated(folder, batch, use_kl_loss=True)
    dirty, _ = updated(folder, batch | noise, use_kl_loss=True)
    assert torch.equal(clean, dirty)
