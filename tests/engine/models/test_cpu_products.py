"""The compiled layers of training: PyTorch's numbers but for rounding, whatever the sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import training_ops
from engine.kernels.decoder_layer import gated_mlp, linears, rotate, rotated_linears

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(training_ops.library() is None, reason="no AVX512-BF16, or no C compiler"),
]
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
    """Of x where weights are frozen, of weights where x has none."""
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


def test_a_gate_may_be_of_any_size() -> None:
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
    large = torch.empty(2048, 2048, dtype=torch.bfloat16)
    assert not training_ops.takes_products(large[:4], [large]), "oneDNN is the faster one"
