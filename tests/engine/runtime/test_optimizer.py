"""The optimizer: schedules by hand, clipping, and a step that refuses nonsense."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from engine.config import OptimConfig
from engine.errors import EngineError
from engine.runtime.optimizer import Optimizer, learning_rate_factor


def config(**changes: object) -> OptimConfig:
    return OptimConfig.model_validate({"lr": 0.1, "warmup_ratio": 0.0} | changes)


@pytest.mark.parametrize(
    ("changes", "total", "wanted"),
    [
        ({}, 4, [1, 1, 1, 1]),
        ({"warmup_ratio": 0.5}, 4, [0.5, 1, 1, 1]),
        ({"schedule": "linear", "min_lr_ratio": 0.2}, 4, [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"schedule": "linear", "min_lr_ratio": 0.0, "warmup_ratio": 0.4}, 5, [0.5, 1, 1, 2 / 3]),
        (
            {"schedule": "cosine", "min_lr_ratio": 0.1},
            4,
            [1, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 0.55],
        ),
        ({"schedule": "cosine"}, 1, [1, 0.1]),
        ({"schedule": "linear", "warmup_ratio": 0.05}, 1, [1]),
        ({"schedule": "cosine", "num_cycles": 1.0, "min_lr_ratio": 0.0}, 4, [1, 0.5, 0, 0.5, 1]),
        (
            {"schedule": "wsd", "stable_ratio": 0.5, "min_lr_ratio": 0.2, "warmup_ratio": 0.2},
            5,
            [1, 1, 1, 1, 0.2 + 0.8 / 2, 0.2],
        ),
    ],
)
def test_schedule(changes: dict[str, object], total: int, wanted: list[float]) -> None:
    factors = [learning_rate_factor(s, total, config(**changes)) for s in range(len(wanted))]
    assert factors == pytest.approx(wanted)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("total", [1, 2, 7, 50])
def test_rate_never_leaves_its_range(schedule: str, warmup: float, total: int) -> None:
    optim = config(schedule=schedule, warmup_ratio=warmup)
    factors = [learning_rate_factor(s, total, optim) for s in range(total)]
    assert min(factors) > 0
    assert max(factors) == pytest.approx(1.0)


def test_lr_is_that_of_the_latest_step() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = Optimizer(model, config(warmup_ratio=0.5), total_steps=4)
    assert optimizer.lr == pytest.approx(0.05)
    rates = []
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        rates.append(optimizer.lr)
    assert rates == pytest.approx([0.05, 0.1, 0.1])


def test_first_step_moves_each_weight_by_the_rate() -> None:
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    Optimizer(model, config(weight_decay=0.0), 10).step()
    torch.testing.assert_close(before - model.weight.detach(), torch.full((2, 3), 0.1))


def test_clips_to_the_global_norm_and_returns_the_norm_before() -> None:
    def moved(clip: float, scale: float) -> tuple[float, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        start = model.weight.detach().clone()
        optimizer = Optimizer(model, config(grad_clip=clip, weight_decay=0.0), 10)
        for s in (1.0, scale):  # Adam forgets a common scale, but not that of one step in two
            (s * model(torch.tensor([[1.0, 2.0, 3.0]])).sum()).backward()
            norm = optimizer.step()
        return norm, start - model.weight.detach()

    true_norm = math.sqrt(2 * (1 + 4 + 9) + 2)
    norm, clipped = moved(true_norm, 100.0)
    assert norm == pytest.approx(100 * true_norm)
    _, unscaled = moved(true_norm, 1.0)
    torch.testing.assert_close(clipped, unscaled)
    assert not torch.allclose(moved(1e9, 100.0)[1], unscaled)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was(bad: float) -> None:
    model = nn.Linear(2, 2)
    optimizer = Optimizer(model, config(), 10)
    before = [p.detach().clone() for p in model.parameters()]
    (model(torch.ones(1, 2)).sum() * bad).backward()
    with pytest.raises(EngineError, match=r"training has diverged; lower optim\.lr"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_vectors_get_no_decay_and_frozen_parameters_no_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Optimizer(model, config(weight_decay=0.5), 10)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for old, new in zip(before[:4], list(model.parameters())[:4], strict=True):
        factor = 1 - 0.1 * 0.5 if old.dim() == 2 else 1.0
        torch.testing.assert_close(new.detach(), old * factor)
    assert all(torch.equal(a, b) for a, b in zip(before[4:], model[2].parameters(), strict=True))


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rule_is_torchs_and_goes_on_from_its_state(name: str, dtype: torch.dtype) -> None:
    """On weights, and on the masters of bfloat16 ones; half of the steps after a resumption."""
    changes = {"momentum": 0.9} if name == "SGD" else {}
    settings = config(optimizer=name, weight_decay=0.1, grad_clip=1e9, **changes)
    torch.manual_seed(0)
    model = nn.Linear(3, 3).to(dtype)
    wanted = {key: value.detach().float().clone() for key, value in model.named_parameters()}
    own = {"momentum": 0.9} if name == "SGD" else {"betas": (settings.beta1, settings.beta2)}
    groups = [
        {"params": [wanted["weight"]], "weight_decay": 0.1},
        {"params": [wanted["bias"]], "weight_decay": 0.0},
    ]
    theirs = getattr(torch.optim, name)(groups, lr=0.1, **own)
    optimizer = Optimizer(model, settings, 4)
    for step in range(4):
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = Optimizer(model, settings, 4)
            optimizer.load_state_dict(saved)
        for key, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, 0.5 + step, dtype=torch.float32)
            wanted[key].grad = torch.full_like(wanted[key], 0.5 + step)
        optimizer.step()
        theirs.step()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), wanted[key].to(dtype))


def test_a_state_of_another_rule_is_refused() -> None:
    model = nn.Linear(2, 2)
    saved = Optimizer(model, config(), 4).state_dict()
    Optimizer(model, config(optimizer="Adam"), 4).load_state_dict(saved)
    with pytest.raises(EngineError, match=r"saved optimizer is Adam and optim\.optimizer is SGD"):
        Optimizer(model, config(optimizer="SGD"), 4).load_state_dict(saved)


def test_settings_of_another_rule_or_schedule_are_refused() -> None:
    for changes, words in (
        ({"momentum": 0.9}, "momentum=0.9 is SGD's"),
        ({"num_cycles": 1.0}, "num_cycles=1.0 is a cosine's"),
        ({"schedule": "cosine", "stable_ratio": 0.5}, "stable_ratio=0.5 is wsd's"),
    ):
        with pytest.raises(ValueError, match=words):
            config(**changes)
