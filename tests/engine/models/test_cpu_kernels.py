"""The compiled loops of training: PyTorch's numbers but for rounding, whatever the sizes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_engine import segments_of
from torch import Tensor, nn

from engine.config import OptimConfig
from engine.kernels import training_ops
from engine.kernels.attention import compiled_attention, takes_compiled
from engine.models.packed_attention import Segments, _by_segment
from engine.models.vocabulary_head import token_statistics
from engine.runtime import optimizer
from engine.runtime.optimizer import Optimizer

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
