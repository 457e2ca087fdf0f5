"""KL estimators, the exact divergence, and the coefficient's controllers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.algorithms.divergences import (
    NAMES,
    AdaptiveKL,
    FixedKL,
    check_kind,
    full_kl,
    kl_estimate,
)
from engine.errors import ConfigError, DataError

D = [-2.0, -0.5, 0.0, 0.5, 3.0]


@pytest.mark.parametrize(
    ("kinds", "value", "slope"),
    [
        (("k1", "kl"), lambda d: d, lambda d: 1.0),
        (("abs",), abs, lambda d: math.copysign(1, d) if d else 0.0),
        (("k2", "mse"), lambda d: d * d / 2, lambda d: d),
        (("k3", "low_var_kl"), lambda d: math.exp(-d) + d - 1, lambda d: 1 - math.exp(-d)),
    ],
)
def test_estimators_by_hand(kinds: tuple[str, ...], value, slope) -> None:
    for kind in kinds:
        for suffix in ("", "+"):
            log_probs = torch.tensor([D], dtype=torch.float64, requires_grad=True)
            reference = torch.full((1, 5), 0.25, dtype=torch.float64)
            got = kl_estimate(log_probs + 0.25, reference, kind + suffix)
            got.sum().backward()
            assert got[0].tolist() == pytest.approx([value(d) for d in D])
            expected = D if suffix else [slope(d) for d in D]
            assert log_probs.grad is not None
            assert log_probs.grad[0].tolist() == pytest.approx(expected)


def test_every_name_is_an_estimator_or_full() -> None:
    x = torch.zeros(1, 1)
    for kind in NAMES:
        check_kind(kind)
        if kind != "full":
            assert kl_estimate(x, x, kind).item() == 0
    with pytest.raises(ConfigError, match="full_kl with logits"):
        kl_estimate(x, x, "full")
    with pytest.raises(ConfigError, match="'k4' is unknown; use one of k1"):
        kl_estimate(x, x, "k4")
    with pytest.raises(DataError, match="differ in shape"):
        kl_estimate(x, torch.zeros(1, 2))


@given(st.floats(-50, 50, width=32))
def test_k3_is_never_negative_and_stays_bounded(d: float) -> None:
    got = kl_estimate(torch.tensor([[d]]), torch.zeros(1, 1), "k3").item()
    assert 0 <= got <= 10


def test_no_gradient_to_the_reference_and_none_from_garbage() -> None:
    log_probs = torch.tensor([[-1.0, torch.nan]], requires_grad=True)
    reference = torch.tensor([[-2.0, torch.inf]], requires_grad=True)
    for kind in NAMES[:-1]:
        log_probs.grad = None
        got = kl_estimate(log_probs, reference, kind, torch.tensor([[1, 0]]))
        got.sum().backward()
        assert got[0, 1] == 0
        assert reference.grad is None
        assert log_probs.grad is not None
        assert log_probs.grad[0, 1] == 0
        assert log_probs.grad[0, 0] != 0


def _logits(seed: int, *shape: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_sampled_estimators_are_unbiased(kind: str) -> None:
    """Weighing the estimate of every token by its probability gives the exact divergence."""
    ours, theirs = _logits(0, 7) / 3, _logits(1, 7) / 3
    log_p, log_q = ours.log_softmax(-1), theirs.log_softmax(-1)
    estimates = kl_estimate(log_p[None], log_q[None], kind)[0]
    assert estimates.max() < 10, "the clamp is not in the way"
    torch.testing.assert_close((log_p.exp() * estimates).sum(), full_kl(ours, theirs))


def test_the_expected_gradient_of_k2_is_the_gradient_of_the_divergence() -> None:
    """And so is that of every `+` variant; plain k1 has an expected gradient of zero."""
    theirs = _logits(1, 7)
    for kind, right in (("k2", True), ("k1+", True), ("k3+", True), ("k1", False)):
        ours = _logits(0, 7).requires_grad_()
        log_p = ours.log_softmax(-1)
        estimate = kl_estimate(log_p[None], theirs.log_softmax(-1)[None], kind)[0]
        (got,) = torch.autograd.grad((log_p.exp().detach() * estimate).sum(), ours)
        exact = _logits(0, 7).requires_grad_()
        (expected,) = torch.autograd.grad(full_kl(exact, theirs), exact)
        assert torch.allclose(got, expected) == right, kind


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_full_kl_is_exact_whatever_the_chunks(chunk: int) -> None:
    ours, theirs = _logits(0, 2, 4, 6).requires_grad_(), _logits(1, 2, 4, 6).requires_grad_()
    got = full_kl(ours, theirs, chunk_tokens=chunk, temperature=0.7)
    p, q = (ours / 0.7).log_softmax(-1), (theirs / 0.7).log_softmax(-1)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(got, expected)
    weights = _logits(2, 2, 4)
    (gradient,) = torch.autograd.grad((weights * got).sum(), ours, retain_graph=True)
    (reference,) = torch.autograd.grad((weights * expected).sum(), ours)
    torch.testing.assert_close(gradient, reference)
    got.sum().backward()
    assert theirs.grad is None


def test_full_kl_gradient_against_finite_differences() -> None:
    ours, theirs = _logits(0, 3, 5).requires_grad_(), _logits(1, 3, 5)
    assert torch.autograd.gradcheck(lambda x: full_kl(x, theirs, chunk_tokens=2), (ours,))


def test_full_kl_leaves_out_impossible_tokens() -> None:
    ours, theirs = _logits(0, 1, 3, 4), _logits(1, 1, 3, 4)
    ours[..., 3] = theirs[..., 3] = -torch.inf
    ours.requires_grad_()
    got = full_kl(ours, theirs)
    got.sum().backward()
    torch.testing.assert_close(got, full_kl(ours[..., :3], theirs[..., :3]))
    assert ours.grad is not None
    assert ours.grad.isfinite().all()
    assert full_kl(ours[:, :0], theirs[:, :0]).tolist() == [[]]
    with pytest.raises(DataError, match="differ in shape"):
        full_kl(ours, theirs[..., :3])


def test_adaptive_coefficient_by_hand_and_across_a_checkpoint() -> None:
    control = AdaptiveKL(0.1, target_kl=2.0, horizon=100)
    control.update(2.2, 50)  # error 0.1
    assert control.value == pytest.approx(0.1 * 1.05)
    control.update(100.0, 50)  # error clipped to 0.2
    assert control.value == pytest.approx(0.105 * 1.1)
    resumed = AdaptiveKL(0.1, target_kl=2.0, horizon=100)
    resumed.load_state_dict(control.state_dict())
    for each in (control, resumed):
        each.update(0.0, 25)  # error clipped to −0.2
    assert resumed.value == control.value == pytest.approx(0.1155 * 0.95)
    control.update(0.0, 10**9)
    assert control.value > 0


def test_fixed_coefficient_stays() -> None:
    control = FixedKL(0.3)
    control.update(100.0, 1000)
    assert control.value == 0.3
    other = FixedKL(0.1)
    other.load_state_dict(control.state_dict())
    assert other.value == 0.3


def test_bad_control_is_refused() -> None:
    with pytest.raises(ConfigError, match="target_kl=0"):
        AdaptiveKL(0.1, 0, 10)
    control = AdaptiveKL(0.1, 1.0, 10)
    with pytest.raises(DataError, match="KL to the reference is nan"):
        control.update(math.nan, 4)
    assert control.value == 0.1
