"""FSDP2 on real gloo ranks: training equals one rank's, and the traps on the way are watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dispatched import LiveBytes, Products
from family_models import CHANGES
from gloo_ranks import RankError, run_ranks
from sharded_training import (
    Run,
    accumulate,
    alone,
    assert_alike,
    assert_same_everywhere,
    build,
    decoder_layers,
    train,
)
from thorough import and_slow
from tiny_engine import outputs_with_kl, response_log_probs, tiny_model, training_batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import OptimConfig, ParallelConfig
from engine.models.forward import response_values
from engine.models.lora import BaseModelView
from engine.models.value_head import create_critic_model
from engine.parallel import fsdp
from engine.parallel import module_shards as full
from engine.parallel.layout import Layout
from engine.parallel.process_groups import Ranks
from engine.runtime.optimizer import Optimizer

TWO = [Layout(dp=2), Layout(fsdp=2), Layout(sp=2)]
FOUR = [Layout(dp=2, fsdp=2), Layout(fsdp=4), Layout(fsdp=2, sp=2), Layout(dp=2, sp=2)]


def trains_as_alone(runs: list[Run], tolerance: float) -> None:
    for run in runs:
        got = train(run)
        assert_same_everywhere(got)
        assert_alike(got, alone(run.family, run.lora, run.dtype), tolerance)


@pytest.mark.parametrize(
    "runs",
    and_slow(
        [
            [Run(Layout(dp=2), "qwen2"), Run(Layout(dp=2), "llama", lora=True)],
            [Run(Layout(fsdp=2), "llama"), Run(Layout(fsdp=2), "llama", lora=True)],
            [Run(Layout(dp=2, sp=2), "qwen2")],
        ],
        [
            [Run(layout, "qwen2"), Run(layout, "llama"), Run(layout, "llama", lora=True)]
            for layout in (*TWO, *FOUR)
        ],
    ),
    ids=lambda runs: str(runs[0].layout),
)
def test_training_equals_one_ranks(runs: list[Run]) -> None:
    run_ranks(runs[0].layout.world_size, trains_as_alone, runs, 2e-6)


@pytest.mark.parametrize(
    "layout", and_slow([Layout(fsdp=2)], [Layout(dp=2), Layout(dp=2, fsdp=2)]), ids=str
)
def test_memory_savers_change_nothing(layout: Layout) -> None:
    savers = {"offload_policy": True, "offload_optimizer": True, "activation_checkpointing": True}
    runs = [
        Run(layout, "qwen2", parallel=ParallelConfig.model_validate(savers)),
        Run(layout, "qwen2", parallel=ParallelConfig(activation_checkpointing=True), lora=True),
    ]
    run_ranks(layout.world_size, trains_as_alone, runs, 2e-6)


def trains_as_without(layout: Layout, checkpoints: bool | str) -> None:
    for lora in (False, True):
        savers = ParallelConfig.model_validate({"activation_checkpointing": checkpoints})
        got, plain = (train(Run(layout, lora=lora, parallel=p)) for p in (savers, ParallelConfig()))
        assert (got.losses, got.norms) == (plain.losses, plain.norms)
        assert torch.equal(got.log_probs, plain.log_probs)
        assert all(torch.equal(got.weights[name], w) for name, w in plain.weights.items())


@pytest.mark.parametrize("layout", and_slow([Layout(fsdp=2)], [Layout(dp=2, fsdp=2)]), ids=str)
def test_selective_checkpoints_change_no_bit_on_ranks(layout: Layout) -> None:
    run_ranks(layout.world_size, trains_as_without, layout, "selective")


@pytest.mark.parametrize("layout", and_slow([Layout(fsdp=2)], [Layout(dp=2, fsdp=2)]), ids=str)
def test_bfloat16_stays_near_float32(layout: Layout) -> None:
    """bf16 keeps 8 bits: gradients of a sum over tokens are good to a percent or two."""
    mixed = ParallelConfig(compute_dtype="bfloat16")
    runs = [Run(layout, parallel=mixed), Run(layout, parallel=mixed, lora=True)]
    run_ranks(layout.world_size, trains_as_alone, runs, 0.03)


def test_adapters_of_float32_train_on_a_base_of_bfloat16() -> None:
    run_ranks(2, trains_as_alone, [Run(Layout(fsdp=2), lora=True, dtype="bfloat16")], 0.02)


class Dyadic(nn.Module):
    """Σ w·x, whose gradients are its inputs, in three groups: two layers and the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 1, bias=False) for _ in range(2)])
        self.own = nn.Parameter(torch.zeros(3))
        nn.init.constant_(self.layers[0].weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x).sum() for layer in self.layers) + (self.own * x).sum()


def summed_gradients(layout: Layout, mixed: bool) -> None:
    """Rank r's gradients are 2^-4r: in bf16, whose step at 1 is 2^-7, their sum would be lost."""
    ranks = Ranks.form(layout)
    model = Dyadic()
    config = ParallelConfig(compute_dtype="bfloat16" if mixed else "")
    fsdp.shard_model(model, ranks, config, layers=list(model.layers))
    wanted = sum(2.0 ** (-4 * rank) for rank in range(layout.world_size))
    for passes in (1, 2):
        model(torch.full((1, 3), 2.0 ** (-4 * ranks.rank))).backward()
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            assert isinstance(parameter.grad, DTensor)
            whole = parameter.grad.full_tensor()
            assert whole.dtype == parameter.dtype == torch.float32
            assert torch.equal(whole, torch.full(parameter.shape, passes * wanted))
            shares = layout.fsdp * layout.sp
            assert parameter.to_local().numel() <= -(-parameter.shape[0] // shares) * 3


@pytest.mark.parametrize("layout", and_slow([Layout(dp=2, sp=2)], [*TWO[1:], *FOUR[:3]]), ids=str)
def test_gradients_are_sums_reduced_in_float32(layout: Layout) -> None:
    """Not averages, in every group: set_gradient_divide_factor on the root reaches the root only"""
    for mixed in (False, True):
        run_ranks(layout.world_size, summed_gradients, layout, mixed)


class AllReduces(TorchDispatchMode):
    """Counts the all-reduces that are started inside it."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += "allreduce" in str(func)
        return func(*args, **(kwargs or {}))


def sums_over_copies() -> None:
    """Three passes of which the last one sums over `dp`: an all-reduce for each of three groups."""
    ranks = Ranks.form(Layout(dp=2, fsdp=2))
    model = Dyadic()
    fsdp.shard_model(model, ranks, ParallelConfig(), layers=list(model.layers))
    with AllReduces() as counted:
        for last in (False, False, True):
            fsdp.reduce_over_copies(model, last)
            model(torch.full((1, 3), 2.0 ** (-4 * ranks.rank))).backward()
    assert counted.count == 3
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        whole = parameter.grad.full_tensor()
        assert torch.equal(whole, torch.full(parameter.shape, 3 * sum(16.0**-r for r in range(4))))


def test_copies_sum_their_gradients_once_a_step() -> None:
    run_ranks(4, sums_over_copies)


def masters_below_bfloat16() -> None:
    model = Dyadic()
    config = ParallelConfig(compute_dtype="bfloat16")
    ranks = Ranks.form(Layout(fsdp=2))
    fsdp.shard_model(model, ranks, config, layers=list(model.layers))
    rate = 2.0**-12  # too little for bf16 weights of 1
    optim = OptimConfig(lr=rate, weight_decay=0.0, warmup_ratio=0.0, schedule="constant")
    optimizer = Optimizer(model, optim, 10, ranks)
    for _ in range(4):
        model(torch.ones(1, 3)).backward()
        optimizer.step()
    weight = full_weights(model, ranks)["layers.0.weight"]
    torch.testing.assert_close(weight, torch.full((1, 3), 1 - 4 * rate), rtol=0, atol=1e-6)


def test_updates_smaller_than_bfloat16_add_up() -> None:
    run_ranks(2, masters_below_bfloat16)


def full_weights(model: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    return {name: whole.clone() for name, whole in full.gather_full_tensors(model, ranks)}


def gathered_weights(model: nn.Module) -> list[str]:
    """Names of parameters that are not shares."""
    return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]


def passes_of_all_kinds() -> None:
    ranks = Ranks.form(Layout(fsdp=2))
    batch = training_batch(5)
    plain, model = tiny_model("qwen2"), tiny_model("qwen2")
    fsdp.shard_model(model, ranks, ParallelConfig(), layers=decoder_layers(model))

    with torch.no_grad():
        own = plain(input_ids=batch["input_ids"]).logits
        inside = fsdp.run_forward(model, lambda: model(input_ids=batch["input_ids"]).logits)
        torch.testing.assert_close(inside, own)
        assert gathered_weights(model) == []
        wanted = response_log_probs(plain, batch, 1.0)
        got = fsdp.run_forward(model, lambda: response_log_probs(model, batch, 1.0))
        torch.testing.assert_close(got, wanted)
        assert gathered_weights(model) == []  # the root's own would be kept for backward

    # An update must be seen, even if a pass without backward had gathered weights before.
    model.unshard()  # type: ignore[operator]
    optimizer = Optimizer(model, OptimConfig(lr=0.1, warmup_ratio=0.0), 10, ranks)
    model.unshard()  # type: ignore[operator]
    optimizer.zero_gradients()
    optimizer.parameters[0].grad.fill_(1.0)  # type: ignore[union-attr]
    optimizer.step()
    with torch.no_grad():
        moved = fsdp.run_forward(model, lambda: response_log_probs(model, batch, 1.0))
    full.load_full_tensors(plain, full_weights(model, ranks), Ranks(Layout()))
    torch.testing.assert_close(moved, response_log_probs(plain, batch, 1.0).detach())
    assert not torch.allclose(moved, wanted)


def test_passes_without_gradient_read_the_present_weights_and_keep_none() -> None:
    run_ranks(2, passes_of_all_kinds)


def policy_and_its_base_in_one_pass() -> None:
    ranks = Ranks.form(Layout(fsdp=2))
    batch = training_batch(5)
    got = []
    for sharded in (False, True):
        model = build(Run(lora=True))
        if sharded:
            fsdp.shard_model(model, ranks, ParallelConfig(), layers=decoder_layers(model))
        out = fsdp.run_forward(
            model, lambda m=model: outputs_with_kl(m, batch, 1.0, BaseModelView(m))
        )
        assert out.full_kl is not None
        (out.full_kl.sum() + out.log_probs.mean()).backward()
        fsdp.reshard(model)
        grads = {
            name: p.grad.full_tensor() / 2 if isinstance(p.grad, DTensor) else p.grad
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        got.append((out.full_kl.detach(), grads))
    torch.testing.assert_close(got[1], got[0])


def test_a_pass_may_run_the_model_twice() -> None:
    run_ranks(2, policy_and_its_base_in_one_pass)


def critic_pass() -> None:
    ranks = Ranks.form(Layout(fsdp=2))
    batch = training_batch(5)
    got = []
    for sharded in (False, True):
        critic = create_critic_model(tiny_model("qwen2"))
        nn.init.ones_(critic.head.weight)
        layers: Any = critic.get_submodule("backbone.layers")
        if sharded:
            fsdp.checkpoint_activations(list(layers))
            fsdp.shard_model(critic, ranks, ParallelConfig(), layers=list(layers))
        values = fsdp.run_forward(critic, lambda model=critic: response_values(model, batch))
        (values * batch["response_mask"]).sum().backward()
        head = critic.head.weight.grad
        got.append(head.full_tensor() / 2 if isinstance(head, DTensor) else head)
    torch.testing.assert_close(got[1], got[0])


def test_a_critic_s_head_has_the_gradient_of_one_rank() -> None:
    run_ranks(2, critic_pass)


def recovers_from_a_failed_pass() -> None:
    ranks = Ranks.form(Layout(fsdp=2))
    batch = training_batch(4)
    model = tiny_model("qwen2")
    fsdp.shard_model(model, ranks, ParallelConfig(), layers=decoder_layers(model))

    def broken() -> Tensor:
        model.base_model(input_ids=batch["input_ids"])
        raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token"):
        fsdp.run_forward(model, broken)
    assert gathered_weights(model) == []
    loss = accumulate(model, batch, ranks)
    fresh = accumulate(tiny_model("qwen2"), batch, Ranks(Layout()))
    assert loss == pytest.approx(fresh)


def test_a_failed_pass_leaves_the_model_usable() -> None:
    run_ranks(2, recovers_from_a_failed_pass)


def special_weights() -> tuple[bool, bool, int]:
    class Quantised(nn.Parameter):
        pass

    model = Dyadic()
    codes = torch.arange(6, dtype=torch.uint8)
    model.layers[0].weight = Quantised(codes, requires_grad=False)
    fsdp.shard_model(model, Ranks.form(Layout(fsdp=2)), ParallelConfig(), layers=list(model.layers))
    kept = model.layers[0].weight
    return type(kept) is Quantised, torch.equal(kept, codes), len(gathered_weights(model))


def test_quantised_weights_stay_whole() -> None:
    assert run_ranks(2, special_weights) == [(True, True, 1)] * 2


def test_nothing_is_shared_where_the_layout_shares_nothing() -> None:
    model = tiny_model("llama")
    kind, names = type(model), [name for name, _ in model.named_parameters()]
    fsdp.shard_model(
        model, Ranks(Layout()), ParallelConfig(offload_policy=True), layers=decoder_layers(model)
    )
    fsdp.reshard(model)
    assert type(model) is kind
    assert [name for name, _ in model.named_parameters()] == names
    assert fsdp.run_forward(model, lambda: 3) == 3
    assert not fsdp.shards_weights(Ranks(Layout(dp=2)))
    assert fsdp.shards_weights(Ranks(Layout(sp=2)))


def test_checkpointed_layers_compute_again_in_backward_only() -> None:
    runs: list[bool] = []
    model, plain = tiny_model("qwen2"), tiny_model("qwen2")
    names = [name for name, _ in model.named_parameters()]
    fsdp.checkpoint_activations(decoder_layers(model))
    for layer in decoder_layers(model):
        norm = layer.get_submodule("input_layernorm")  # early: computing again stops at the last
        norm.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    assert [name for name, _ in model.named_parameters()] == names
    batch = training_batch(4)
    with torch.no_grad():
        response_log_probs(model, batch, 1.0)
    assert runs == [False] * 2
    for each in (model, plain):
        response_log_probs(each, batch, 1.0).sum().backward()
    assert runs == [False] * 2 + [True] * 4
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("family", "again"),  # of a layer's products and attention: selective, full
    [
        pytest.param("llama", (3, 7), id="q, v and gate; down is never needed again"),
        pytest.param("qwen2", (3, 7), id="with biases"),
        pytest.param("phi3", (2, 4), id="of qkv, o, gate_up and down the first and third"),
        pytest.param("qwen3_moe", (4, 8), id="grouped; the router's is as thick in so small one"),
    ],
)
def test_selective_checkpoints_repeat_less_and_keep_less(
    family: str, again: tuple[int, int]
) -> None:
    batch, products, kept, gradients = training_batch(9), [], [], []
    for mode in (None, "selective", True):
        model = tiny_model(family)
        layers = decoder_layers(model)
        if mode is not None:
            fsdp.checkpoint_activations(layers, mode)
        with LiveBytes() as live:
            log_probs = response_log_probs(model, batch, 1.0)
            kept.append(live.now)
        with Products() as counted:
            log_probs.sum().backward()
        products.append(counted.count)
        gradients.append([p.grad for p in model.parameters()])
    none, selective, full = products
    assert (selective - none, full - none) == tuple(2 * count for count in again)
    assert kept[0] > 1.2 * kept[1] > 1.44 * kept[2]
    for mine, alike, plain in zip(*gradients, strict=True):
        assert torch.equal(mine, plain)
        assert torch.equal(alike, plain)


@pytest.mark.parametrize("family", [*CHANGES, "mixtral"])
def test_selective_checkpoints_change_no_bit_of_a_family(family: str) -> None:
    batch, gradients = training_batch(4), []
    for mode in (None, "selective"):
        model = tiny_model(family)
        if mode is not None:
            layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
            fsdp.checkpoint_activations(list(layers), mode)
        response_log_probs(model, batch, 1.0).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert gradients[0]
    assert all(map(torch.equal, *gradients))


def test_a_wrong_layout_is_an_error_of_the_ranks() -> None:
    with pytest.raises(RankError, match="needs 4 ranks, 2 have met"):
        run_ranks(2, trains_as_alone, [Run(Layout(fsdp=4))], 1.0)
