"""The actor: one update doesn't depend on how it is cut, and each term moves the policy."""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from thorough import and_slow
from tiny_engine import save_family, training_batch
from torch import Tensor

from engine.algorithms import aggregation, policy_losses
from engine.algorithms.aggregation import merge
from engine.algorithms.preference_losses import get_pair_loss
from engine.batch import Batch
from engine.config import ActorConfig, ParallelConfig
from engine.models import load_model
from engine.models.forward import LogProbReader
from engine.parallel.layout import Layout
from engine.parallel.process_groups import Ranks
from engine.runtime.sharded_model import ShardedModel
from engine.workers.actor import ActorWorker
from engine.workers.role import WorkerContext

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
    return torch.cat([p.detach().flatten() for p in worker.sharded.module.parameters()])


def updated(folder: Path, batch: Batch, **changes: Any) -> tuple[Tensor, dict[str, float]]:
    worker = actor(folder, **changes)
    metrics = worker.update(batch)
    return weights(worker), metrics


def gradient(worker: ActorWorker, batch: Batch) -> Tensor:
    """The accumulated gradient of one mini-batch, flat, in float64."""
    worker._accumulate(batch)
    grads = [
        torch.zeros_like(p) if p.grad is None else p.grad
        for p in worker.sharded.module.parameters()
    ]
    return torch.cat([g.flatten().double() for g in grads])


def prepared(loss: str, batch: Batch) -> Batch:
    """The batch with what `loss` needs from a view of all of it."""
    return batch | policy_losses.prepare(
        loss, batch["old_log_probs"], batch["advantages"], batch["response_mask"]
    )


MODES = [(name, None) for name in policy_losses.names()] + [
    ("vanilla", m) for m in aggregation.MODES
]


@pytest.mark.parametrize(("loss", "mode"), MODES)
def test_the_gradient_doesn_t_depend_on_micro_batches_or_ranks(
    folder: Path, loss: str, mode: str | None
) -> None:
    terms = {
        "policy_loss": {"loss_mode": loss},
        "loss_agg_mode": mode,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "entropy_coeff": 0.01,
    }
    batch = prepared(loss, training_batch(12))
    whole = gradient(actor(folder, max_tokens_per_micro_batch=10_000, **terms), batch)
    small = gradient(actor(folder, max_tokens_per_micro_batch=64, **terms), batch)
    assert whole.norm() > 1e-3
    assert (whole - small).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize("loss", policy_losses.names())
def test_metrics_don_t_depend_on_micro_batches(folder: Path, loss: str) -> None:
    batch = prepared(loss, training_batch(12))
    terms = {"policy_loss": {"loss_mode": loss}, "use_kl_loss": True}
    _, facts = updated(folder, batch, max_tokens_per_micro_batch=10_000, **terms)
    _, same = updated(folder, batch, max_tokens_per_micro_batch=64, **terms)
    assert facts.keys() == same.keys()
    for name, value in facts.items():
        assert same[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def with_observations(batch: Batch) -> Batch:
    """Each third token of a response was read, not sampled: an episode's rows."""
    place = torch.arange(batch["response_mask"].shape[1])
    return batch | {"response_mask": batch["response_mask"] * (place % 3 != 1)}


def test_tokens_that_were_not_sampled_move_nothing(folder: Path) -> None:
    batch = with_observations(training_batch(6))
    noise = 5 * torch.rand(batch["response_mask"].shape) * (1 - batch["response_mask"])
    told = ("ref_log_probs", "old_log_probs", "rollout_log_probs", "advantages")
    other = batch | {name: batch[name] + noise for name in told}
    terms = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
    ours, theirs = (gradient(actor(folder, **terms), one) for one in (batch, other))
    assert ours.norm() > 1e-3
    assert torch.equal(ours, theirs)


def test_entropy_is_that_of_sampled_tokens(folder: Path) -> None:
    batch = with_observations(training_batch(6))
    batch = batch | {"advantages": torch.zeros_like(batch["advantages"])}
    found = gradient(actor(folder, entropy_coeff=1.0, loss_agg_mode="token-mean"), batch)
    model, mask = load_model(str(folder), "float32"), batch["response_mask"]
    read = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    log_probs = model(**read).logits[:, -mask.shape[1] - 1 : -1].log_softmax(-1)
    ((log_probs.exp() * log_probs).sum(-1) * mask).sum().div(mask.sum()).backward()
    own = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    assert own.norm() > 1e-3
    assert (found - own).norm() < 1e-4 * own.norm()


ZERO_ROWS = [range(4), range(0, 12, 2), range(11)]
EACH = list(zip(policy_losses.names(), cycle(ZERO_ROWS)))


@pytest.mark.parametrize(
    ("loss", "zero_rows"),
    and_slow(
        EACH, [pair for pair in product(policy_losses.names(), ZERO_ROWS) if pair not in EACH]
    ),
)
def test_rows_without_gradient_are_left_out_and_change_nothing(
    folder: Path, loss: str, zero_rows: range
) -> None:
    batch = training_batch(12)
    batch["advantages"][list(zero_rows)] = 0.0
    batch = prepared(loss, batch)
    terms = {"policy_loss": {"loss_mode": loss}}
    skipping, asked = actor(folder, **terms), []
    skipping._policy_loss = _recorded(skipping._policy_loss, asked)  # type: ignore[method-assign]
    left_out = gradient(skipping, batch)
    # A KL term far below rounding keeps every row in.
    whole = gradient(actor(folder, use_kl_loss=True, kl_loss_coef=1e-30, **terms), batch)
    regularized = policy_losses.get_policy_loss(loss).regularized
    assert sum(asked) == (12 if regularized else 12 - len(zero_rows))
    assert (left_out - whole).norm() <= 1e-5 * whole.norm() + 1e-20
    assert whole.norm() > 0 or loss == "gspo", "all of gspo's tight bounds may clip"


def _recorded(loss: Any, rows: list[int]) -> Any:
    def call(outputs: Any, micro: Batch, **options: Any) -> Any:
        rows.append(len(micro))
        return loss(outputs, micro, **options)

    return call


def test_a_step_without_any_gradient_still_follows_momentum(folder: Path) -> None:
    first, batch = training_batch(8), training_batch(8, seed=5)
    silent = batch | {"advantages": torch.zeros_like(batch["advantages"])}
    course = []
    for terms in ({}, {"use_kl_loss": True, "kl_loss_coef": 1e-30}):
        worker = actor(folder, **terms)
        worker.update(first)
        metrics = worker.update(silent)
        assert metrics["actor/rows_skipped"] == (0.0 if terms else 1.0)
        course.append(weights(worker))
    torch.testing.assert_close(course[0], course[1], rtol=0, atol=1e-6)
    assert not torch.allclose(course[0], weights(actor(folder)))


def test_full_kl_is_exact(folder: Path, tmp_path: Path) -> None:
    batch = training_batch(6)
    torch.manual_seed(1)
    reference = load_model(save_family("qwen2", tmp_path))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    worker = actor(folder, use_kl_loss=True, kl_loss_type="full", kl_loss_coef=1.0)
    worker.context.process.reference = ShardedModel(reference, Ranks(Layout()), ParallelConfig())
    metrics = worker.update(batch)
    wanted = torch.zeros(())
    with torch.no_grad():
        ours, theirs = load_model(folder), reference
        for row in range(len(batch)):
            ids = batch["input_ids"][row][batch["attention_mask"][row].bool()][None]
            length = int(batch["response_mask"][row].sum())
            p, q = (m(ids).logits[0, -length - 1 : -1].log_softmax(-1) for m in (ours, theirs))
            wanted = wanted + (p.exp() * (p - q)).sum()
    wanted = wanted / batch["response_mask"].sum()
    assert float(wanted) > 0.01
    assert metrics["actor/kl"] == pytest.approx(float(wanted), rel=1e-4)


def test_denominators_follow_the_filtered_mask(folder: Path) -> None:
    """Rejected tokens count neither above nor below the line."""
    batch = training_batch(8)
    kept = batch["response_mask"].clone()
    kept[:3] = 0.0
    edited = gradient(actor(folder), batch | {"response_mask": kept})
    alone = gradient(actor(folder), batch.rows(range(3, 8)))
    assert (edited - alone).norm() < 1e-5 * alone.norm()


def test_importance_weights_scale_the_gradient(folder: Path) -> None:
    batch = training_batch(8)
    doubled = batch | {"rollout_is_weights": 2.0 * batch["response_mask"]}
    plain, twice = gradient(actor(folder), batch), gradient(actor(folder), doubled)
    assert (twice - 2 * plain).norm() < 1e-5 * plain.norm()


def pairs_by_hand(folder: Path, batch: Batch, beta: float) -> float:
    """DPO's loss from plain log-softmax sums, row by row."""
    model, sums = load_model(folder), []
    with torch.no_grad():
        for row in range(len(batch)):
            ids = batch["input_ids"][row][batch["attention_mask"][row].bool()]
            length = int(batch["response_mask"][row].sum())
            logits = model(ids[None]).logits[0, -length - 1 : -1].log_softmax(-1)
            sums.append(float(logits.gather(1, ids[-length:, None]).sum()))
    policy, ref = torch.tensor(sums), batch["ref_log_probs"].sum(1)
    ratios = (policy - ref).view(-1, 2)
    return float(-torch.nn.functional.logsigmoid(beta * (ratios[:, 0] - ratios[:, 1])).mean())


def test_pairs_raise_the_chosen_over_the_rejected(folder: Path) -> None:
    batch = training_batch(8)
    worker = actor(folder, optim={"lr": 3e-3, "weight_decay": 0.0, "warmup_ratio": 0.0})
    before = pairs_by_hand(folder, batch, 0.1)
    history = [worker.update_pairs(batch) for _ in range(5)]
    assert history[-1]["actor/rewards/margins"] > history[0]["actor/rewards/margins"] + 0.1
    worker.sharded.module.save_pretrained(folder.parent / "after")
    assert pairs_by_hand(folder.parent / "after", batch, 0.1) < before - 0.01
    assert worker.context.process.policy.version == 5


def test_pair_gradients_are_exact_and_don_t_depend_on_micro_batches(folder: Path) -> None:
    batch = training_batch(8)
    whole, small = (actor(folder, max_tokens_per_micro_batch=budget) for budget in (10_000, 64))
    sigmoid, reader = get_pair_loss("sigmoid"), LogProbReader(1.0)
    parts = [merge(w.accumulate_pairs(batch, sigmoid, reader)) for w in (whole, small)]
    flat = [
        torch.cat([p.grad.flatten() for p in w.sharded.module.parameters() if p.grad is not None])
        for w in (whole, small)
    ]
    assert (flat[0] - flat[1]).norm() < 1e-5 * flat[0].norm()
    assert float(parts[0]["rewards/margins"].count) == float(parts[1]["rewards/margins"].count) == 4
    # Along the gradient, the loss changes by the squared norm.
    step = 1e-3 / float(flat[0].norm())
    with torch.no_grad():
        for parameter in whole.sharded.module.parameters():
            if parameter.grad is not None:
                parameter.sub_(step * parameter.grad)
    whole.sharded.module.save_pretrained(folder.parent / "moved")
    change = pairs_by_hand(folder, batch, 0.1) - pairs_by_hand(folder.parent / "moved", batch, 0.1)
    assert change == pytest.approx(step * float(flat[0].square().sum()), rel=0.1)


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

    untouched = actor(folder, optim={"weight_decay": 0.0})
    untouched.update(batch)
    assert torch.equal(weights(untouched), weights(actor(folder))), "no term, no change"
    start, end = course(**term)
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
    real = worker.train_state.optimizer.step
    worker.train_state.optimizer.step = lambda: taken.append(1) or real()  # type: ignore[method-assign]
    assert worker.context.process.policy is worker.policy
    assert worker.policy.version == 0
    metrics = worker.update(training_batch(10))
    assert len(taken) == 2 * 3  # epochs × mini-batches of 4, 4 and 2 rows
    assert worker.policy.version == 1
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
