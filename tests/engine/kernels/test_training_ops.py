"""The compiled loops of training against PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_engine import VOCABULARY, segments_of, shared_prompts_batch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from engine.config import LoRAConfig, OptimConfig
from engine.kernels import decoder_layer, training_ops
from engine.kernels.attention import compiled_attention, takes_compiled
from engine.kernels.decoder_layer import gated_mlp, linears, rotate, rotated_linears
from engine.models import add_adapters
from engine.models.forward import token_outputs
from engine.models.fused import apply_fused
from engine.models.packed_attention import Segments, _by_segment
from engine.models.packing import apply_packing
from engine.models.vocabulary_head import token_statistics
from engine.runtime import optimizer
from engine.runtime.optimizer import Optimizer, accumulate_in_float32

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(training_ops.library() is None, reason="no AVX512-BF16, or no C compiler"),
]


ROUNDING = 2**-8  # of bfloat16, and half of it once more


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def near(got: Tensor | None, wanted: Tensor) -> None:
    """Every element within rounding, beside the largest ones."""
    assert got is not None
    wanted = wanted.detach()
    error = (got.float() - wanted).abs()
    assert (error <= 2 * ROUNDING * wanted.abs() + 1e-3 * wanted.abs().max()).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [3, 32, 330])
def test_elementwise_loops_are_torch_s(width: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x, plus, above = (randn(5, width, seed=seed) for seed in range(3))
    weight = (1 + 0.1 * randn(width, seed=3)).bfloat16()
    total, out, scale = training_ops.norm(x, weight, 1e-5, plus)
    assert torch.equal(total, x + plus)
    of_x, of_weight = training_ops.norm_gradients(total, weight, scale, above, plus)
    y, w = (t.float().requires_grad_() for t in (total, weight))
    wanted = F.rms_norm(y, (width,), w, 1e-5)
    wanted.backward(above.float())
    assert y.grad is not None
    assert w.grad is not None
    near(out, wanted)
    near(of_x, y.grad + plus.float())
    near(of_weight, w.grad)
    near(training_ops.column_sums(x), x.float().sum(0))

    gate, up = ((3 * t).float().requires_grad_() for t in (x, plus))
    product = F.silu(gate) * up
    product.backward(above.float())
    halves = gate.detach().bfloat16(), up.detach().bfloat16()
    near(training_ops.silu_product(*halves), product)
    found = training_ops.silu_product_gradients(*halves, above.clone(), product=True)
    assert gate.grad is not None
    assert up.grad is not None
    for got, exact in zip(found, (gate.grad, up.grad, product), strict=True):
        near(got, exact)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "tokens", "width"), [(0, 3, 32), (5, 5, 7), (40, 90, 330)])
def test_scattered_rows_are_index_copy_s(rows: int, tokens: int, width: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x = randn(rows, width)
    index = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))[:rows]
    wanted = torch.zeros(tokens, width, dtype=torch.bfloat16).index_copy_(0, index, x)
    assert torch.equal(training_ops.scatter_rows(x, index, tokens), wanted)


def test_a_gate_may_be_of_any_size() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -20.0, 0.0, 88.0, 200.0, 1e30]).bfloat16()
    up = torch.ones_like(gate)
    assert torch.equal(training_ops.silu_product(gate, up)[3:], F.silu(gate)[3:])
    assert training_ops.silu_product(gate, up)[:3].abs().max() < 1e-6
    nan = torch.full_like(gate, float("nan"))
    assert training_ops.silu_product(nan, up).isnan().all()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("d", [12, 64])
def test_rotary_positions_and_their_gradient(d: int, batch: int) -> None:
    x, above = randn(2, 5, 3, d), randn(2, 5, 3, d, seed=1)
    cos, sin = (randn(batch, 5, 1, d, seed=seed) for seed in (2, 3))
    y = x.float().requires_grad_()
    a, b = y.chunk(2, -1)
    wanted = y * cos.float() + torch.cat([-b, a], -1) * sin.float()
    wanted.backward(above.float())
    assert y.grad is not None
    near(training_ops.rotate(x, cos, sin), wanted)
    near(training_ops.rotate(above, cos, sin, back=True), y.grad)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "groups"),
    [
        (5, 1, 64, [(0, [40])] * 3),
        (4, 2, 32, [(9, [5, 60, 1]), (0, [77]), (50, [26] * 3)]),
        (6, 3, 12, [(3, [4, 5]), (0, [1]), (100, [130, 7])]),
        (2, 2, 80, [(0, [97]), (0, [48]), (17, [49, 50, 96])]),
        (1, 1, 64, [(48, []), (0, [300])]),
    ],
)
def test_attention_and_its_gradient_are_torch_s(
    heads: int, kv_heads: int, d: int, groups: list[tuple[int, list[int]]]
) -> None:
    check_attention(heads, kv_heads, d, segments_of(groups))


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(3, 1, 32), (4, 2, 80)])
def test_attention_of_a_tree_and_its_gradient_are_torch_s(
    heads: int, kv_heads: int, d: int
) -> None:
    """Branches of several lengths at several depths, and a row alone."""
    runs = [
        *[
            (0, 0, 0, 30),
            (0, 30, 30, 31),
            (0, 31, 31, 90),
            (0, 31, 90, 91),
            (0, 31, 90, 91, 91, 99),
        ],
        *[(0, 31, 90, 91, 99, 104), (0, 30, 104, 107), (107, 107, 107, 120)],
        *[(120, 120, 120, 137), (120, 137, 137, 190), (120, 190, 190, 260), (120, 190, 260, 261)],
    ]
    check_attention(heads, kv_heads, d, Segments.of_runs(runs, torch.device("cpu")))


def check_attention(heads: int, kv_heads: int, d: int, segments: Segments) -> None:
    tokens = segments.runs[-1][-1]
    shapes = [(1, tokens, count, d) for count in (heads, kv_heads, kv_heads)]
    every = [(2 * randn(*s, seed=i)).transpose(1, 2) for i, s in enumerate(shapes)]
    above = randn(1, tokens, heads, d, seed=9)
    assert takes_compiled(every[0], every[1], every[2], segments.runs)
    ours = [t.detach().requires_grad_() for t in every]
    exact = [t.detach().float().requires_grad_() for t in every]
    got = compiled_attention(ours[0], ours[1], ours[2], segments.runs, 0.2)
    got.backward(above)
    wanted = _by_segment(exact[0], exact[1], exact[2], segments, 0.2)
    wanted.backward(above.float())
    for found, true in zip([got, *ours], [wanted, *exact], strict=True):
        found, true = (found, true) if found is got else (found.grad, true.grad)
        assert (found.float() - true).norm() < 0.003 * true.norm()
        assert (found.float() - true).abs().max() < 0.02 * true.abs().max()


def test_long_rows_few_rows_and_what_is_no_tree_go_another_way() -> None:
    cpu = torch.device("cpu")

    def takes(
        groups: list[tuple[int, list[int]]] | Segments, dtype: torch.dtype = torch.bfloat16
    ) -> bool:
        segments = groups if isinstance(groups, Segments) else segments_of(groups)
        one = torch.zeros(1, 1, segments.runs[-1][3], 16, dtype=dtype)
        return takes_compiled(one, one, one, segments.runs)

    assert takes([(4, [1020])])
    assert not takes([(4, [1021])])
    assert not takes([(4, [7])], torch.float32)
    assert takes(Segments.of_runs([(0, 0, 0, 4), (0, 4, 4, 9)], cpu))
    assert takes(Segments.of_runs([(0, 0, 0, 4), (0, 4, 4, 9), (0, 9, 9, 12), (0, 4, 12, 13)], cpu))
    assert not takes(Segments.of_runs([(0, 0, 0, 4), (0, 3, 4, 9)], cpu))
    assert not takes(Segments.of_runs([(0, 0, 0, 4), (0, 4, 4, 9), (0, 4, 5, 9, 9, 12)], cpu))
    assert not takes(Segments.of_runs([(0, 0, 0, 4), (0, 4, 4, 9), (0, 2, 4, 6, 9, 12)], cpu))
    torch.set_num_threads(2)
    assert not takes([(4, [7, 8])]), "one thread would have all of it"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [5, 32, 301])
def test_what_a_head_says_and_its_gradients_are_torch_s(size: int, threads: int) -> None:
    """One entry of some rows can't be sampled."""
    torch.set_num_threads(threads)
    logits = 4 * randn(7, size)
    logits[2:4, 1] = -torch.inf
    targets = torch.tensor([0, size - 1, 2, 3, 0, 4, 3])
    exact = logits.float().requires_grad_()
    asked = {"entropy": True, "entropy_gradient": True, "sum_pi_squared": True}
    wanted = token_statistics(exact, targets, 0.7, **asked)
    of_log_probs, of_entropy = (randn(7, seed=seed).float() for seed in (1, 2))
    ((wanted["log_probs"] * of_log_probs) + wanted["entropy"] * of_entropy).sum().backward()
    log_probs, sums, entropy, squares = training_ops.head_statistics(
        logits, targets, 0.7, entropy=True, squares=True
    )
    assert entropy is not None
    assert squares is not None
    found = {"log_probs": log_probs, "entropy": entropy, "sum_pi_squared": squares}
    for name, got in found.items():
        torch.testing.assert_close(got, wanted[name].detach(), rtol=1e-5, atol=1e-5)
    both = (entropy, of_entropy)
    assert exact.grad is not None
    near(training_ops.head_gradients(logits, targets, sums, of_log_probs, 0.7, both), exact.grad)

    exact.grad = None
    (token_statistics(exact, targets, 0.7)["log_probs"] * of_log_probs).sum().backward()
    assert exact.grad is not None
    near(training_ops.head_gradients(logits, targets, sums, of_log_probs, 0.7), exact.grad)


def test_a_nan_among_logits_stays_one() -> None:
    logits = randn(2, 40)
    logits[1, 7] = torch.nan
    targets = torch.tensor([3, 3])
    every = training_ops.head_statistics(logits, targets, 1.0, entropy=True, squares=True)
    assert [[*t.isnan()] for t in every if t is not None] == [[False, True]] * 4


@pytest.mark.parametrize("clip", [1e9, 0.5])
def test_adamw_is_torch_s(clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments, masters and their rounding, over steps of large and small gradients."""
    torch.manual_seed(0)
    shape = nn.Sequential(nn.Linear(37, 11), nn.Linear(11, 300)).bfloat16()
    config = OptimConfig(lr=1e-2, weight_decay=0.1, grad_clip=clip, warmup_ratio=0.5)
    models, made = [copy.deepcopy(shape), copy.deepcopy(shape)], []
    for model, compiled in zip(models, (True, False), strict=True):
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(optimizer, "takes_masters", lambda *args: False)
            made.append(Optimizer(model, config, 10))
    for step in range(6):
        norms = []
        for model, one in zip(models, made, strict=True):
            versions = [p._version for p in model.parameters()]
            for i, p in enumerate(model.parameters()):
                draw = torch.Generator().manual_seed(10 * step + i)
                p.grad = torch.randn(p.shape, generator=draw) * 10.0 ** (i - step)
            norms.append(one.step())
            assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))
        assert norms[0] == norms[1]
    ours, theirs = (one.state_dict()["moments"] for one in made)
    for name, state in theirs.items():
        assert ours[name].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(ours[name][key], value, rtol=1e-5, atol=1e-7)
        weight = models[0].get_parameter(name)
        assert torch.equal(weight, ours[name]["master"].bfloat16())


SIZES = [(1, 16, 16), (5, 48, 80), (97, 96, 256), (401, 112, 336)]  # rows, width, width inside


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    tensor = (scale * torch.randn(shape, generator=draw)).bfloat16()
    return tensor.requires_grad_()


def matrices(width: int, inner: int) -> list[Tensor]:
    shapes = (inner, width), (inner, width), (width, inner)
    return [drawn(*s, seed=i, scale=s[1] ** -0.5) for i, s in enumerate(shapes, 1)]


def exact(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().float().requires_grad_() for tensor in tensors]


def check(got: Tensor | None, wanted: Tensor | None, tolerance: float) -> None:
    assert got is not None
    assert wanted is not None
    assert (got.float() - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "width", "inner"), SIZES)
def test_a_gated_mlp_and_its_gradients(rows: int, width: int, inner: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x, above = drawn(1, rows, width), drawn(1, rows, width, seed=9)
    ours = [x, *matrices(width, inner)]
    y, gate, up, down = true = exact(ours)
    wanted = (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    wanted.backward(above.float())
    for weight in ours[1:]:
        weight.grad_dtype = torch.float32
    got = gated_mlp(ours[0], ours[1], ours[2], ours[3])
    assert got.grad_fn.compiled  # type: ignore[union-attr]
    got.backward(above)
    check(got, wanted, 0.006)
    for mine, their in zip(ours, true, strict=True):
        check(mine.grad, their.grad, 0.006)
    with torch.no_grad():  # which keeps nothing
        assert torch.equal(gated_mlp(ours[0], ours[1], ours[2], ours[3]), got)
    residual = drawn(1, rows, width, seed=3)
    added = gated_mlp(*(tensor.detach() for tensor in ours), residual)
    assert torch.equal(added, residual + got)
    (of_residual,) = torch.autograd.grad(added, residual, above)
    assert torch.equal(of_residual, above)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "width", "out"), SIZES)
def test_linear_layers_and_their_gradients(rows: int, width: int, out: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x = drawn(1, rows, width)
    weights = [drawn(n, width, seed=n, scale=width**-0.5) for n in (out, 32, 79)]
    biases = [drawn(out, seed=5), None, drawn(79, seed=6)]
    above = [drawn(1, rows, len(w), seed=7) for w in weights]
    leaves = [x, *weights, *(bias for bias in biases if bias is not None)]
    for leaf in leaves[1:]:
        leaf.grad_dtype = torch.float32
    got = linears(x, list(zip(weights, biases, strict=True)))
    assert got[0].grad_fn.compiled  # type: ignore[union-attr]
    torch.autograd.backward(got, above)
    true = exact(leaves)
    y, first, second, third, *offsets = true
    wanted = F.linear(y, first, offsets[0]), y @ second.T, F.linear(y, third, offsets[1])
    torch.autograd.backward(wanted, [top.float() for top in above])
    for mine, their in zip(got, wanted, strict=True):
        check(mine, their, 0.003)
    check(x.grad, y.grad, 0.003)
    for mine, their in zip(leaves[1:], true[1:], strict=True):
        check(mine.grad, their.grad, 1e-5)  # of products that are exact, and sums in float32


@pytest.mark.parametrize("d", [12, 32])
@pytest.mark.parametrize("batch", [1, 2])
def test_rotary_positions_come_with_the_layers(d: int, batch: int) -> None:
    torch.set_num_threads(2)
    x, above = drawn(2, 51, 48), [drawn(2, 51, heads, d, seed=heads) for heads in (4, 8, 8)]
    weights = [drawn(len(a[0, 0]) * d, 48, seed=i) for i, a in enumerate(above)]
    affines = [(weight, drawn(len(weight), seed=4)) for weight in weights]
    cos, sin = (drawn(batch, 51, 1, d, seed=seed).detach() for seed in (2, 3))
    got = rotated_linears(x, affines, cos, sin)
    found = torch.autograd.grad(got, [x, *weights], above)
    *first, last = (out.view(2, 51, -1, d) for out in linears(x, affines))
    wanted = [*(rotate(out, cos, sin) for out in first), last]
    for mine, their in zip(got, wanted, strict=True):
        assert torch.equal(mine, their)
    for mine, their in zip(found, torch.autograd.grad(wanted, [x, *weights], above), strict=True):
        assert torch.equal(mine, their)


def test_gradients_of_some_alone() -> None:
    """They are those of x where weights are frozen, of weights where x has none."""
    x, weights = drawn(50, 48), matrices(48, 96)
    calls: list[Callable[[], Tensor]] = [
        lambda: gated_mlp(x, weights[0], weights[1], weights[2]),
        lambda: linears(x, [(weights[0], None), (weights[1], None)])[1],
    ]
    for call in calls:
        every = torch.autograd.grad(call().sum(), [x, weights[1]])
        x.requires_grad_(False)
        (alone,) = torch.autograd.grad(call().sum(), [weights[1]])
        assert torch.equal(alone, every[1])
        x.requires_grad_()
        for weight in weights:
            weight.requires_grad_(False)
        (alone,) = torch.autograd.grad(call().sum(), [x])
        assert torch.equal(alone, every[0])
        for weight in weights:
            weight.requires_grad_()


def test_rows_know_nothing_of_each_other() -> None:
    x, (gate, up, down) = drawn(130, 96), matrices(96, 160)
    whole, (wide,) = gated_mlp(x, gate, up, down), linears(x, [(gate, None)])
    torch.set_num_threads(2)
    for at in (slice(0, 1), slice(7, 60), slice(100, 130)):
        assert torch.equal(gated_mlp(x[at], gate, up, down), whole[at])
        assert torch.equal(linears(x[at], [(gate, None)])[0], wide[at])


def test_a_gate_may_be_of_any_size_cpu() -> None:
    gates = torch.tensor([-1e30, -200.0, -88.0, -20.0, 0.0, 88.0, 1e30, float("nan")]).bfloat16()
    x = torch.zeros(len(gates), 16).bfloat16()
    x[:, 0], x[:, 1] = gates, 1
    first, second = torch.zeros(2, 16, 16).bfloat16()
    first[0, 0] = second[0, 1] = 1
    out = gated_mlp(x, first, second, first)[:, 0]
    assert torch.equal(out[3:7], F.silu(gates[3:7]))
    assert out[:3].abs().max() < 1e-6
    assert out[7].isnan()


def test_other_tensors_go_another_way() -> None:
    x, w = drawn(4, 48).detach(), drawn(32, 48).detach()
    assert training_ops.takes_products(x, [w], [None])
    assert not training_ops.takes_products(x.float(), [w.float()])
    assert not training_ops.takes_products(x[:0], [w])
    assert training_ops.takes_products(x, [w[:21]])
    narrow = [drawn(4, 40).detach(), drawn(32, 40).detach()]
    assert not training_ops.takes_products(narrow[0], narrow[1:]), "not a multiple of sixteen"
    assert not training_ops.takes_products(x.T.contiguous().T, [w])
    assert not training_ops.takes_products(x, [w], [drawn(32).detach().float()])
    large = torch.empty(8192, 8208, dtype=torch.bfloat16)
    assert not training_ops.takes_products(large[:4], [large]), "sums would take much memory"


SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def packed_model(family: str = "qwen2") -> Any:
    torch.manual_seed(0)
    model: Any = (
        Qwen2ForCausalLM(Qwen2Config(**SHAPE))
        if family == "qwen2"
        else LlamaForCausalLM(LlamaConfig(**SHAPE))
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model = model.bfloat16()
    accumulate_in_float32(model, list(model.parameters()))
    apply_packing(model)
    assert apply_fused(model)
    return model


def found(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Tensor]]:
    """How many layers were one function; log-probs and gradients."""
    layers: list[Tensor] = []
    plain: Callable[..., Tensor] = decoder_layer.compiled_layer

    def counted(*args: Any) -> Tensor:
        layers.append(plain(*args))
        return layers[-1]

    model.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(decoder_layer, "compiled_layer", counted)
        log_probs = token_outputs(model, shared_prompts_batch(), 1.0).log_probs
    weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    (log_probs * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return len(layers), {"log_probs": log_probs.detach()} | gradients


def in_parts(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(decoder_layer, "takes_layer", lambda *args: False)
        layers, values = found(model, patch)
    assert not layers
    return values


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_layer_is_its_parts(family: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one, of the tokens that are read, as well."""
    torch.set_num_threads(threads)
    model = packed_model(family)
    layers, got = found(model, monkeypatch)
    assert layers == 2
    assert_same(got, in_parts(model, monkeypatch))


@pytest.mark.parametrize("trained", ["k_proj", "layers.1.mlp", "layers.0.input_layernorm"])
def test_frozen_weights_have_no_gradient(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    layers, got = found(model, monkeypatch)
    assert layers == 2
    assert {trained in name for name in got if name != "log_probs"} == {True}
    assert_same(got, in_parts(model, monkeypatch))


def test_other_layers_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a hook inside; with adapters; in float32."""
    model = packed_model()
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *args: None)
    assert found(model, monkeypatch)[0] == 1
    handle.remove()
    add_adapters(model, LoRAConfig(rank=2), 0)
    assert found(model, monkeypatch)[0] == 0
    assert found(packed_model().float(), monkeypatch)[0] == 0
