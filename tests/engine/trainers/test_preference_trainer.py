"""Preference learning: its losses and gradients, the reference, resumption bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import random_completions, tiny_model, write_tiny_folder
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from engine import PreferenceTrainer
from engine.config import LoRAConfig, PreferenceTrainingConfig
from engine.data.training_examples import (
    LabelledExample,
    PairExample,
    PreferenceExample,
    collate_preferences,
    with_others,
)
from engine.errors import ConfigError, DataError
from engine.models import load_policy_model
from engine.workers.role import WorkerContext
from engine.workers.supervised import PreferenceWorker

pytestmark = pytest.mark.usefixtures("one_thread")


def pairs(count: int, seed: int = 0) -> list[PreferenceExample]:
    prompts, chosen = random_completions(count, seed)
    _, rejected = random_completions(count, seed + 100)
    return [PairExample(*ids) for ids in zip(prompts, chosen, rejected, strict=True)]


def labels(count: int, seed: int = 0) -> list[PreferenceExample]:
    prompts, responses = random_completions(count, seed)
    return [
        LabelledExample(p, r, i % 3 > 0)
        for i, (p, r) in enumerate(zip(prompts, responses, strict=True))
    ]


def settings(**changes: Any) -> PreferenceTrainingConfig:
    values = {"threads": 1, "train_batch_size": 4, "optim": {"lr": 1e-3}, "max_steps": 6}
    return PreferenceTrainingConfig.model_validate(values | changes)


def trainer(model: Any, seed: int = 0, **changes: Any) -> PreferenceTrainer:
    return PreferenceTrainer(model, 0, settings(**changes), seed=seed)


def weights(model: PreTrainedModel) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- losses and gradients, by the formulas of the papers in float64 -----------------------------


def log_prob(model: PreTrainedModel, prompt: list[int], response: list[int]) -> Tensor:
    logs = model(input_ids=torch.tensor([prompt + response])).logits[0].log_softmax(-1)
    at = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
    return logs[at, torch.tensor(response)].sum()


def odds(mean: Tensor) -> Tensor:
    return mean - torch.log(1 - mean.exp())


# Of log π of both sides, the reference's, and both lengths.
FORMULAS: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "sigmoid": (
        {"beta": 0.3, "label_smoothing": 0.1},
        lambda c, r, rc, rr, n, m: (
            -0.9 * torch.log(torch.sigmoid(0.3 * (c - rc - r + rr)))
            - 0.1 * torch.log(torch.sigmoid(-0.3 * (c - rc - r + rr)))
        ),
    ),
    "sigmoid by length": (
        {"beta": 5.0, "length_normalize": True},
        lambda c, r, rc, rr, n, m: F.softplus(-5.0 * ((c - rc) / n - (r - rr) / m)),
    ),
    "ipo": (
        {"beta": 0.2},
        lambda c, r, rc, rr, n, m: ((c - rc) / n - (r - rr) / m - 1 / (2 * 0.2)) ** 2,
    ),
    "hinge": ({"beta": 0.2}, lambda c, r, rc, rr, n, m: F.relu(1 - 0.2 * (c - rc - r + rr))),
    "robust": (
        {"beta": 0.2, "label_smoothing": 0.2},
        lambda c, r, rc, rr, n, m: (
            (0.8 * F.softplus(-0.2 * (c - rc - r + rr)) - 0.2 * F.softplus(0.2 * (c - rc - r + rr)))
            / 0.6
        ),
    ),
    "simpo": (
        {"beta": 2.0, "simpo_gamma": 0.7},
        lambda c, r, rc, rr, n, m: F.softplus(-(2.0 * (c / n - r / m) - 0.7)),
    ),
    "orpo": (
        {"beta": 0.5},
        lambda c, r, rc, rr, n, m: -c / n + 0.5 * F.softplus(-(odds(c / n) - odds(r / m))),
    ),
    "likelihood": (
        {"beta": 0.5, "sft_weight": 0.3},
        lambda c, r, rc, rr, n, m: F.softplus(-0.5 * (c - r)) - 0.3 * c / n,
    ),
}


def gradients(worker: PreferenceWorker, batch: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients of an update, which takes no step."""
    found: dict[str, Tensor] = {}

    def step() -> float:
        for name, p in worker.sharded.module.named_parameters():
            found[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        return 0.0

    worker.train_state.optimizer.step = step  # type: ignore[method-assign]
    return worker.update(batch), found


def begun(model: PreTrainedModel, **changes: Any) -> PreferenceWorker:
    config = settings(max_tokens_per_micro_batch=64, **changes)
    worker = PreferenceWorker(WorkerContext("preference"), model=model, config=config, seed=0)
    worker.begin(1)
    worker.sharded.module.eval()
    return worker


def assert_same(found: dict[str, Tensor], wanted: PreTrainedModel) -> None:
    for name, p in wanted.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(found[name].double(), p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradients_are_those_of_the_paper_in_float64(name: str, packing: bool) -> None:
    options, formula = FORMULAS[name]
    model, rows = tiny_model("qwen2"), pairs(7)
    exact, before = copy.deepcopy(model).double(), tiny_model("qwen2", seed=1).double()
    losses, known = [], []
    for row in rows:
        assert isinstance(row, PairExample)
        sides = [log_prob(exact, row.prompt_ids, ids) for ids in row.responses]
        with torch.no_grad():
            reference = [log_prob(before, row.prompt_ids, ids) for ids in row.responses]
        known.append(replace(row, reference=(float(reference[0]), float(reference[1]))))
        losses.append(formula(*sides, *reference, *map(len, row.responses)))
    wanted = torch.stack(losses).mean()
    wanted.backward()
    worker = begun(model, loss=name.split()[0], packing=packing, **options)
    metrics, found = gradients(worker, collate_preferences(known, 0))
    assert metrics["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert_same(found, exact)


def test_kto_is_that_of_the_paper_in_float64() -> None:
    model = tiny_model("qwen2")
    rows = with_others([row for row in labels(7) if isinstance(row, LabelledExample)])
    exact, before = copy.deepcopy(model).double(), tiny_model("qwen2", seed=2).double()
    ratios, others, known = [], [], []
    for row in rows:
        reference = [float(log_prob(before, row.prompt_ids, ids)) for ids in row.responses]
        known.append(replace(row, reference=(reference[0], reference[1])))
        ratios.append(log_prob(exact, row.prompt_ids, row.responses[0]) - reference[0])
        others.append(float(log_prob(exact, row.prompt_ids, row.responses[1])) - reference[1])
    point = max(0.0, sum(others) / len(others))
    losses = [
        1.5 * (1 - torch.sigmoid(0.2 * (ratio - point)))
        if row.label
        else 0.5 * (1 - torch.sigmoid(0.2 * (point - ratio)))
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    wanted = torch.stack(losses).mean()
    wanted.backward()
    options = {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    metrics, found = gradients(begun(model, loss="kto", **options), collate_preferences(known, 0))
    assert metrics["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert metrics["kl"] == pytest.approx(point, rel=1e-4)
    assert_same(found, exact)


# --- a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "rows"), [("sigmoid", pairs), ("kto", labels), ("orpo", pairs)])
def test_it_learns_to_prefer(loss: str, rows: Callable[..., list[PreferenceExample]]) -> None:
    history: list[dict[str, float]] = []
    subject = trainer(
        tiny_model("qwen2"), loss=loss, max_steps=16, train_batch_size=8, optim={"lr": 3e-3}
    )
    subject.on_step = lambda step, total, metrics: history.append(metrics)
    final = subject.fit(rows(8), rows(4, seed=9))
    gap = [m["preference/rewards/chosen"] - m["preference/rewards/rejected"] for m in history]
    assert gap[-1] > gap[0] + 0.1
    assert history[-1]["preference/loss"] < history[0]["preference/loss"]
    assert {"preference/lr", "preference/grad_norm", "preference/tokens_per_s"} <= final.keys()
    assert "preference/validation_loss" in final
    if loss == "sigmoid":
        assert gap[0] == pytest.approx(0.0, abs=1e-5)  # the policy is the reference still
        assert final["preference/rewards/accuracies"] == 1.0


class Stop(Exception):
    """What ends a run in a test."""


@pytest.mark.parametrize(("loss", "rows"), [("sigmoid", pairs), ("kto", labels)])
def test_a_run_that_is_stopped_goes_on_bit_for_bit(
    loss: str, rows: Callable[..., list[PreferenceExample]], tmp_path: Path
) -> None:
    def subject() -> PreferenceTrainer:
        return trainer(tiny_model("qwen2"), loss=loss, save_freq=2)

    whole = subject()
    wanted = whole.fit(rows(10), rows(3, seed=5))
    first, again = subject(), subject()

    def stop(step: int, total: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise Stop

    first.on_step = stop
    with pytest.raises(Stop):
        first.fit(rows(10), rows(3, seed=5), tmp_path)
    resumed: list[int] = []
    again.on_resume = lambda folder, step: resumed.append(step)
    found = again.fit(rows(10), rows(3, seed=5), tmp_path)
    assert resumed == [2]
    assert torch.equal(weights(again.model), weights(whole.model))
    for name in wanted.keys() - {"preference/tokens_per_s"}:
        assert found[name] == wanted[name], name


def test_the_reference_is_computed_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = {"reference_cache": str(tmp_path)}
    wanted = trainer(tiny_model("qwen2"), **cache).fit(pairs(6))
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(PreferenceTrainer, "_response_log_probs", None)
    found = trainer(tiny_model("qwen2"), **cache).fit(pairs(6))
    assert found["preference/loss"] == wanted["preference/loss"]
    for other in (trainer(tiny_model("qwen2", seed=1), **cache), trainer(tiny_model("qwen2"))):
        with pytest.raises(TypeError):  # of another model, or without a cache, it is computed
            other.fit(pairs(6))


@pytest.mark.parametrize("rank", [0, 4])
def test_a_live_reference_is_the_one_computed_before(
    rank: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_tiny_folder(tmp_path_factory.mktemp("preference") / "model")
    results = []
    for reference in ("precomputed", "live"):
        model = load_policy_model(folder, "float32", LoRAConfig(rank=rank))
        subject = trainer(model, reference=reference, loss="ipo")
        results.append(subject.fit(pairs(6), pairs(3, seed=3)))
        assert results[0]["preference/rewards/chosen"] != 0
        if rank:
            trained = {n for n, p in subject.model.named_parameters() if p.requires_grad}
            assert all(".lora_" in name for name in trained)
    before, live = results
    assert before.keys() == live.keys()
    for name in before.keys() - {"preference/tokens_per_s"}:
        assert live[name] == pytest.approx(before[name], rel=1e-4, abs=1e-6), name


def test_a_trained_model_is_no_reference() -> None:
    subject = trainer(tiny_model("qwen2"), max_steps=1)
    subject.fit(pairs(4))
    with pytest.raises(ConfigError, match=r"has been trained.*make a new trainer"):
        subject.fit(pairs(4, seed=1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": "kto", "label_smoothing": 0.1}, r"preference.label_smoothing=0.1 has no effect"),
        ({"desirable_weight": 2.0}, r"preference.desirable_weight=2.0 has no effect"),
        ({"loss": "ipo", "simpo_gamma": 2.0}, r"preference.simpo_gamma=2.0 has no effect: 'ipo'"),
        ({"loss": "dpoo"}, "dpoo"),
    ],
)
def test_options_that_the_loss_doesn_t_read(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer(tiny_model("qwen2"), **changes)


def test_pairs_and_labels_are_told_apart() -> None:
    with pytest.raises(DataError, match='completions with a label; read the rows as kind="labels"'):
        trainer(tiny_model("qwen2"), loss="kto").fit(pairs(4))
    with pytest.raises(DataError, match='read the rows as kind="pairs"'):
        trainer(tiny_model("qwen2")).fit(labels(4))
    with pytest.raises(DataError, match="no rows; give a source of pairs"):
        trainer(tiny_model("qwen2")).fit([])
