"""The optimizer and its master weights."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tiny_engine import response_log_probs, tiny_model, training_batch
from torch import Tensor, nn

from engine import HybridActor
from engine.checkpoint.format import RankState
from engine.config import OptimConfig
from engine.errors import CheckpointError, DivergedError, EngineError
from engine.parallel.layout import Layout
from engine.parallel.process_groups import Ranks
from engine.rollout.protocol import SamplingParams
from engine.runtime.optimizer import (
    GROWTH_INTERVAL,
    MASTER,
    LossScale,
    Optimizer,
    learning_rate_factor,
)
from engine.runtime.policy_runtime import PolicyRuntime
from engine.runtime.rollout_weights import SharedWeights
from engine.runtime.train_state import ShardedTrainState


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


def master_config(**changes: object) -> OptimConfig:
    values = {"lr": 1e-6, "warmup_ratio": 0.0, "weight_decay": 0.0, "schedule": "constant"}
    return OptimConfig.model_validate(values | changes)


def linear(dtype: torch.dtype, value: float = 0.02) -> nn.Linear:
    model = nn.Linear(4, 3, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, value)
    return model


def descend(model: nn.Module, optimizer: Optimizer, count: int) -> None:
    dtype = next(model.parameters()).dtype
    for _ in range(count):
        model(torch.ones(1, 4, dtype=dtype)).float().sum().backward()
        optimizer.step()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("offload", [False, True])
def test_updates_of_a_millionth_are_not_lost(offload: bool) -> None:
    """Weights of 0.02 in bfloat16 are 1.2e-4 apart: a step of 1e-6 alone changes none."""
    model, exact = linear(torch.bfloat16), linear(torch.float32)
    exact.weight.data.copy_(model.weight)  # as rounded
    start = model.weight.detach().clone()
    optimizer = Optimizer(model, master_config(), 1000, offload=offload)
    descend(model, optimizer, 10)
    assert torch.equal(model.weight, start)  # not yet
    descend(model, optimizer, 190)
    descend(exact, Optimizer(exact, master_config(), 1000), 200)
    assert not torch.equal(model.weight, start)
    assert torch.equal(model.weight, exact.weight.to(torch.bfloat16))
    [state] = optimizer.state_dict()["moments"].values()
    assert torch.equal(state[MASTER], exact.weight)
    assert {value.dtype for value in state.values()} == {torch.float32}


@pytest.mark.usefixtures("one_thread")
def test_gradients_of_micro_batches_are_added_in_float32() -> None:
    model = linear(torch.bfloat16)
    Optimizer(model, master_config(), 10)
    for size in (1.0, 2.0**-10, 2.0**-10):  # each is lost beside 1 in bfloat16
        (model(torch.ones(1, 4, dtype=torch.bfloat16)).sum() * size).backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((3, 4), 1 + 2.0**-9))


@pytest.mark.usefixtures("one_thread")
def test_rollout_decodes_with_the_storage_that_the_optimizer_writes() -> None:
    model = tiny_model("qwen2").to(torch.bfloat16)
    runtime = PolicyRuntime(model, device=model.device)
    runtime.init_rollout("native", SharedWeights(model), {"max_num_seqs": 4, "seed": 0})
    state = ShardedTrainState(runtime.sharded, master_config(lr=0.05), 10, seed=0)
    params, at = SamplingParams(max_new_tokens=6, temperature=0.0), _addresses(model)
    [before] = runtime.engine.generate([[5, 6, 7]], params)
    response_log_probs(model, training_batch(4), 1.0).sum().neg().backward()
    state.optimizer.step()
    runtime.version += 1
    runtime.sync_weights()
    [after] = runtime.engine.generate([[5, 6, 7]], params)
    assert _addresses(model) == at
    assert before.log_probs != after.log_probs
    logits = model(input_ids=torch.tensor([[5, 6, 7, *after.token_ids]])).logits[0, 2:-1].float()
    own = logits.log_softmax(-1).gather(1, torch.tensor(after.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(after.log_probs), own, rtol=0, atol=0.06)


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in model.named_parameters()}


def training(dtype: torch.dtype, **changes: object) -> tuple[nn.Module, ShardedTrainState]:
    model = tiny_model("qwen2").to(dtype)
    runtime = PolicyRuntime(model, Ranks(Layout()))
    return model, ShardedTrainState(runtime.sharded, master_config(lr=1e-5, **changes), 10, seed=0)


def train(model: nn.Module, state: ShardedTrainState, steps: range) -> None:
    for step in steps:
        scale = state.optimizer.loss_scale
        loss = -response_log_probs(model, training_batch(4, seed=step), 1.0).mean()
        (loss if scale is None else loss * scale.value).backward()
        state.optimizer.step()


def saved(state: ShardedTrainState) -> RankState:
    return RankState.of(copy.deepcopy(state.state_dict()))


def masters(state: ShardedTrainState) -> dict[str, Tensor]:
    return masters_of(state.optimizer)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_resumed_run_has_the_same_masters_bit_for_bit(dtype: torch.dtype) -> None:
    model, whole = training(dtype)
    train(model, whole, range(2))
    middle = saved(whole)
    train(model, whole, range(2, 4))
    other, resumed = training(dtype)
    resumed.load(middle, [middle])
    train(other, resumed, range(2, 4))
    ours, theirs = masters(whole), masters(resumed)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(not torch.equal(ours[name], ours[name].to(dtype).float()) for name in ours)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.usefixtures("one_thread")
def test_a_run_goes_on_in_another_dtype() -> None:
    model, state = training(torch.bfloat16)
    train(model, state, range(2))
    wide, resumed = training(torch.float32)
    resumed.load(saved(state), [saved(state)])
    for name, parameter in wide.named_parameters():
        assert torch.equal(parameter, masters(state)[name])
    train(wide, resumed, range(2, 3))
    narrow, again = training(torch.bfloat16)
    again.load(saved(resumed), [saved(resumed)])
    for name, parameter in narrow.named_parameters():
        exact = wide.get_parameter(name)
        assert torch.equal(masters(again)[name], exact)
        assert torch.equal(parameter, exact.to(torch.bfloat16))
    train(narrow, again, range(3, 4))
    other = RankState.of({"boxes": {}, "model": {}, "moments": {}})
    with pytest.raises(CheckpointError, match="another model"):
        again.load(other, [other])


@pytest.mark.usefixtures("one_thread")
def test_float16_skips_what_overflows_and_halves_the_scale() -> None:
    model, state = training(torch.float16)
    optimizer, scale = state.optimizer, state.optimizer.loss_scale
    assert scale is not None
    train(model, state, range(1))
    before, kept = [p.detach().clone() for p in model.parameters()], saved(state)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf, dtype=torch.float32)
    value = scale.value
    assert optimizer.step() == torch.inf
    assert scale.value == value / 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    changed = saved(state)
    assert changed.get("optimizer")["updates"] == kept.get("optimizer")["updates"]
    _, resumed = training(torch.float16)
    resumed.load(changed, [changed])
    assert resumed.optimizer.loss_scale is not None
    assert resumed.optimizer.loss_scale.value == value / 2
    scale.value = 1.0
    optimizer.zero_gradients()
    optimizer.parameters[0].grad.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(DivergedError, match="diverged"):
        optimizer.step()


@pytest.mark.usefixtures("one_thread")
def test_a_scale_cancels_out_of_the_update() -> None:
    model, exact = linear(torch.float16), linear(torch.float32)
    exact.weight.data.copy_(model.weight)
    optimizer = Optimizer(model, master_config(lr=1e-3), 10)
    assert optimizer.loss_scale is not None
    tiny = 2.0**-30  # below what float16 holds
    (model(torch.ones(1, 4).half()).float().sum() * tiny * optimizer.loss_scale.value).backward()
    (exact(torch.ones(1, 4)).sum() * tiny).backward()
    assert optimizer.step() == pytest.approx(Optimizer(exact, master_config(lr=1e-3), 10).step())
    assert torch.equal(model.weight, exact.weight.half())


@pytest.mark.usefixtures("one_thread")
def test_a_scale_grows_again() -> None:
    scale = LossScale()
    assert scale.back_off()
    for _ in range(GROWTH_INTERVAL - 1):
        scale.grow()
    assert scale.value == 2.0**15
    scale.grow()
    assert scale.value == 2.0**16


@pytest.mark.usefixtures("one_thread")
def test_a_training_script_has_masters_too() -> None:
    actor = HybridActor(tiny_model("qwen2").to(torch.bfloat16))
    optimizer = Optimizer(actor, master_config(lr=1e-6), 10)
    ids = torch.tensor([[5, 6, 7, 8]])
    before = masters_of(optimizer)
    for _ in range(2):
        actor(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    after = masters_of(optimizer)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    for name, parameter in actor.named_parameters():
        assert torch.equal(parameter, after[name].to(torch.bfloat16))


def masters_of(optimizer: Optimizer) -> dict[str, Tensor]:
    moments: dict[str, dict[str, Any]] = optimizer.state_dict()["moments"]
    return {name: values[MASTER].clone() for name, values in moments.items()}
