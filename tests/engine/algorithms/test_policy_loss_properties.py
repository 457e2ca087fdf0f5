"""Properties of every policy loss: cuts don't matter, masks do, gradients are the true ones."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import and_slow
from torch import Tensor

from engine.algorithms import policy_losses
from engine.algorithms.aggregation import MODES, Denominators, aggregate, compute_means, merge
from engine.algorithms.critic_loss import rows_with_gradient
from engine.algorithms.policy_losses import get_policy_loss

SEEDS = st.integers(0, 2**31)
STOP_GRADIENT = {"cispo", "dppo_tv", "dppo_kl", "gspo"}
"""Losses whose gradient is, by design, not the derivative of their value (tables check them)."""
B, T, D = 8, 5, 3
# A loss knows nothing of how it is aggregated: each of either is in some pair.
PAIRS = [(name, MODES[i % len(MODES)]) for i, name in enumerate(policy_losses.names())]
every_pair = pytest.mark.parametrize(
    ("name", "mode"),
    and_slow(PAIRS, [(n, m) for n in policy_losses.names() for m in MODES if (n, m) not in PAIRS]),
)


def _wide(name: str) -> dict[str, float]:
    """A clip range that leaves some tokens inside and some outside, for losses with one."""
    return {"clip_ratio": 0.3} if "clip_ratio" in policy_losses.options(name) else {}


class Problem:
    """A linear policy log π = base + X·θ on random rows, in float64."""

    def __init__(self, seed: int, *, zero_some_advantages: bool = False) -> None:
        g = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.mask = torch.rand(B, T, generator=g) < 0.7
        self.mask[3] = False
        self.features = rand(B, T, D)
        self.base = -rand(B, T).abs() - 0.05
        self.old = self.base + 0.3 * rand(B, T)
        self.advantages = rand(B, 1).expand(B, T) + 0.1 * rand(B, T)
        if zero_some_advantages:
            self.advantages = torch.where(torch.rand(B, 1, generator=g) < 0.5, 0.0, self.advantages)
        self.weights = rand(B, T).exp()
        self.cuts = torch.randint(0, 4, (B,), generator=g)
        self.theta = torch.zeros(D, dtype=torch.float64, requires_grad=True)

    def prepare(self, name: str) -> dict[str, Tensor]:
        return policy_losses.prepare(
            name,
            self.old,
            self.advantages,
            self.mask,
            generator=torch.Generator().manual_seed(0),
            **({"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0} if name == "clip_cov" else {}),
            **({"kl_cov_ratio": 0.3} if name == "kl_cov" else {}),
        )

    def part(self, name: str, rows: Tensor, mode: str, denominators: Denominators):
        """Aggregated loss and metrics of some rows."""
        prepared = {k: v[rows] for k, v in self.prepare(name).items()}
        out = get_policy_loss(name)(
            self.base[rows] + self.features[rows] @ self.theta,
            self.old[rows],
            self.advantages[rows],
            self.mask[rows],
            rollout_is_weights=self.weights[rows],
            **prepared,
            **_wide(name),
        )
        return aggregate(out.loss, self.mask[rows], mode, denominators), out.metrics

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self.theta)[0]


@every_pair
@settings(max_examples=6)
@given(SEEDS)
def test_any_cut_into_micro_batches_gives_the_same(name: str, mode: str, seed: int) -> None:
    problem = Problem(seed)
    whole = Denominators.from_mask(problem.mask)
    loss, metrics = problem.part(name, torch.arange(B), mode, whole)
    gradient = problem.gradient(loss)
    parts = [
        problem.part(name, (problem.cuts == i).nonzero().squeeze(1), mode, whole)
        for i in range(4)
        if bool((problem.cuts == i).any())
    ]
    torch.testing.assert_close(sum(part for part, _ in parts), loss, rtol=1e-11, atol=1e-12)
    summed = sum(problem.gradient(part) for part, _ in parts)
    torch.testing.assert_close(summed, gradient, rtol=1e-11, atol=1e-12)
    assert gradient.abs().sum() > 0
    assert compute_means(merge([m for _, m in parts])) == pytest.approx(
        compute_means(metrics), rel=1e-12
    )


@every_pair
def test_averaging_ranks_with_joined_denominators_gives_the_same(name: str, mode: str) -> None:
    problem, ranks = Problem(11), 4
    every = torch.arange(B)
    loss, _ = problem.part(name, every, mode, Denominators.from_mask(problem.mask))
    rows = [every[i::ranks] for i in range(ranks)]
    joined = Denominators.from_mask(problem.mask[rows[0]])
    for part in rows[1:]:
        joined += Denominators.from_mask(problem.mask[part])
    averaged = sum(
        problem.gradient(problem.part(name, part, mode, joined)[0] * ranks) for part in rows
    )
    torch.testing.assert_close(averaged / ranks, problem.gradient(loss), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", policy_losses.names())
@settings(max_examples=10)
@given(SEEDS)
def test_garbage_outside_the_mask_changes_no_bit(name: str, seed: int) -> None:
    problem = Problem(seed)
    junk = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e300], dtype=torch.float64)
    g = torch.Generator().manual_seed(seed)

    def run(dirty: bool) -> tuple[Tensor, Tensor, dict]:
        def spoil(x: Tensor) -> Tensor:
            drawn = junk[torch.randint(0, 4, x.shape, generator=g)]
            return torch.where(problem.mask, x, drawn) if dirty else x

        log_probs = spoil(problem.base).clone().requires_grad_()
        tensors = [spoil(problem.old), spoil(problem.advantages)]
        prepared = policy_losses.prepare(
            name, *tensors, problem.mask, generator=torch.Generator().manual_seed(0)
        )
        out = get_policy_loss(name)(
            log_probs,
            *tensors,
            problem.mask,
            rollout_is_weights=spoil(problem.weights),
            **prepared,
        )
        out.loss.sum().backward()
        assert log_probs.grad is not None
        return out.loss.detach(), log_probs.grad, compute_means(out.metrics)

    clean, dirty = run(False), run(True)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert clean[2] == dirty[2]
    assert (clean[0][~problem.mask] == 0).all()
    assert (clean[1][~problem.mask] == 0).all()


@pytest.mark.parametrize("name", policy_losses.names())
def test_gradient_flows_into_the_policy_alone(name: str) -> None:
    problem = Problem(4)
    prepared = problem.prepare(name)
    others = [problem.old, problem.advantages, problem.weights]
    old, advantages, weights = (x.clone().requires_grad_() for x in others)
    log_probs = problem.base.clone().requires_grad_()
    out = get_policy_loss(name)(
        log_probs, old, advantages, problem.mask, rollout_is_weights=weights, **prepared
    )
    out.loss.sum().backward()
    assert log_probs.grad is not None
    assert old.grad is advantages.grad is weights.grad is None
    assert not any(value.total.requires_grad for value in out.metrics.values())


@pytest.mark.parametrize("name", [n for n in policy_losses.names() if n not in STOP_GRADIENT])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_gradients_match_finite_differences(name: str, seed: int) -> None:
    problem = Problem(seed)
    prepared = problem.prepare(name)

    def total(log_probs: Tensor) -> Tensor:
        out = get_policy_loss(name)(
            log_probs,
            problem.old,
            problem.advantages,
            problem.mask,
            rollout_is_weights=problem.weights,
            **prepared,
            **_wide(name),
        )
        whole = Denominators.from_mask(problem.mask)
        return aggregate(out.loss, problem.mask, "seq-mean-token-mean", whole)

    assert torch.autograd.gradcheck(total, (problem.base.clone().requires_grad_(),))


@pytest.mark.parametrize("name", policy_losses.names())
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_extreme_ratios_stay_finite(name: str, gap: float) -> None:
    old = torch.full((2, 3), -1.0)
    log_probs = (old + gap).requires_grad_()
    mask, advantages = torch.ones(2, 3), torch.tensor([[1.0] * 3, [-1.0] * 3])
    prepared = policy_losses.prepare(name, old, advantages, mask)
    out = get_policy_loss(name)(log_probs, old, advantages, mask, **prepared)
    out.loss.sum().backward()
    assert log_probs.grad is not None
    assert out.loss.isfinite().all()
    assert log_probs.grad.isfinite().all()


def _gradient(name: str, problem: Problem, mode: str) -> Tensor:
    """Gradient at ratio 1: the policy has not moved since the rollout."""
    log_probs = problem.base.clone().requires_grad_()
    nothing = {k: torch.zeros_like(v) for k, v in problem.prepare(name).items()}
    advantages = problem.advantages[:, :1].expand(B, T)
    out = get_policy_loss(name)(log_probs, problem.base, advantages, problem.mask, **nothing)
    loss = aggregate(out.loss, problem.mask, mode, Denominators.from_mask(problem.mask))
    return torch.autograd.grad(loss, log_probs)[0]


@pytest.mark.parametrize("name", policy_losses.names())
@settings(max_examples=10)
@given(SEEDS)
def test_at_ratio_one_every_loss_is_reinforce(name: str, seed: int) -> None:
    problem = Problem(seed)
    mode = "seq-mean-token-mean"
    expected = _gradient("reinforce", problem, mode)
    torch.testing.assert_close(_gradient(name, problem, mode), expected, rtol=1e-10, atol=1e-12)


@given(SEEDS)
def test_gspo_has_the_gradient_of_its_sequence_form(seed: int) -> None:
    problem = Problem(seed)
    advantages = problem.advantages[:, :1].expand(B, T)
    whole = Denominators.from_mask(problem.mask)
    lengths = problem.mask.sum(1).clamp(min=1)

    def token_form(log_probs: Tensor) -> Tensor:
        out = get_policy_loss("gspo")(
            log_probs, problem.old, advantages, problem.mask, clip_ratio=0.2
        )
        return aggregate(out.loss, problem.mask, "seq-mean-token-mean", whole)

    def sequence_form(log_probs: Tensor) -> Tensor:
        gap = ((log_probs - problem.old) * problem.mask).sum(1) / lengths
        ratio, a = gap.exp(), advantages[:, 0]
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
        return (loss * problem.mask.any(1)).sum() / whole.sequences

    def gradient(form: Callable[[Tensor], Tensor]) -> Tensor:
        log_probs = problem.base.clone().requires_grad_()
        return torch.autograd.grad(form(log_probs), log_probs)[0]

    torch.testing.assert_close(gradient(token_form), gradient(sequence_form))


@every_pair
@settings(max_examples=6)
@given(SEEDS)
def test_skipping_rows_without_gradient_keeps_the_gradient(name: str, mode: str, seed: int) -> None:
    problem = Problem(seed, zero_some_advantages=True)
    whole = Denominators.from_mask(problem.mask)
    kept = rows_with_gradient(name, problem.advantages, problem.mask)
    assert not kept[3], "a row without tokens is always left out"
    zero = (problem.advantages == 0).all(1)
    if not get_policy_loss(name).regularized:
        assert not kept[zero].any()
    loss, _ = problem.part(name, torch.arange(B), mode, whole)
    if not kept.any():
        assert torch.equal(problem.gradient(loss), torch.zeros(D, dtype=torch.float64))
        return
    fewer, _ = problem.part(name, kept.nonzero().squeeze(1), mode, whole)
    torch.testing.assert_close(fewer, loss, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(
        problem.gradient(fewer), problem.gradient(loss), rtol=1e-12, atol=1e-14
    )


def test_nothing_is_skipped_when_entropy_or_kl_pull() -> None:
    advantages, mask = torch.zeros(3, 2), torch.tensor([[1, 1], [0, 0], [1, 0]])
    alive = [True, False, True]
    assert rows_with_gradient("vanilla", advantages, mask).tolist() == [False] * 3
    assert rows_with_gradient("vanilla", advantages, mask, entropy_coeff=0.1).tolist() == alive
    assert rows_with_gradient("vanilla", advantages, mask, kl_loss_coef=0.1).tolist() == alive
    assert rows_with_gradient("dro", advantages, mask).tolist() == alive
    garbage = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [0.0, torch.nan]])
    assert rows_with_gradient("vanilla", garbage, mask).tolist() == [False] * 3


def test_a_regularized_loss_has_a_gradient_without_advantage() -> None:
    """The flag that keeps rows from being skipped says the truth, for every loss."""
    problem = Problem(5)
    for name in policy_losses.names():
        log_probs = problem.base.clone().requires_grad_()
        prepared = {k: torch.ones_like(v) for k, v in problem.prepare(name).items()}
        out = get_policy_loss(name)(
            log_probs, problem.old, torch.zeros(B, T), problem.mask, **prepared
        )
        out.loss.sum().backward()
        assert log_probs.grad is not None
        assert bool(log_probs.grad.any()) == get_policy_loss(name).regularized, name
