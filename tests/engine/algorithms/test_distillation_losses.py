"""Divergences from a teacher against computations in float64 by the papers' formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.algorithms.divergences import (
    Divergence,
    full_divergence,
    rest_of,
    top_k_divergence,
    with_rest,
)
from engine.errors import DataError

KINDS: tuple[Divergence, ...] = ("reverse_kl", "forward_kl", "jsd")
TOKENS, VOCABULARY, BETA = 5, 11, 0.3


def logits(seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(TOKENS, VOCABULARY, generator=made, dtype=torch.float64)


def by_the_paper(p: list[float], q: list[float], kind: Divergence) -> float:
    """In Python's floats, a class at a time."""

    def kl(a: list[float], b: list[float]) -> float:
        return math.fsum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    m = [BETA * y + (1 - BETA) * x for x, y in zip(p, q, strict=True)]
    made = {"reverse_kl": kl(p, q), "forward_kl": kl(q, p)}
    return made.get(kind, BETA * kl(q, m) + (1 - BETA) * kl(p, m))


def top(teacher: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    q = (teacher / temperature).log_softmax(-1)
    ids = q.topk(k).indices
    return ids, with_rest(q, ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 3])
def test_values_are_the_paper_s(kind: Divergence, k: int) -> None:
    ours, theirs, temperature = logits(0), logits(1), 0.7
    if k:
        ids, log_probs = top(theirs, k, temperature)
        got = top_k_divergence(
            ours, ids, log_probs, kind, beta=BETA, temperature=temperature, chunk_tokens=2
        )
    else:
        got = full_divergence(
            ours, theirs, kind, beta=BETA, temperature=temperature, chunk_tokens=2
        )
    for token in range(TOKENS):
        p, q = ((x[token] / temperature).softmax(-1).tolist() for x in (ours, theirs))
        if k:
            chosen = sorted(range(VOCABULARY), key=lambda v: -q[v])[:k]
            others = [v for v in range(VOCABULARY) if v not in chosen]
            p, q = ([x[v] for v in chosen] + [sum(x[v] for v in others)] for x in (p, q))
        assert got[token].item() == pytest.approx(by_the_paper(p, q, kind), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [2, 50])
def test_gradients_are_exact(kind: Divergence, chunk: int) -> None:
    ours, theirs = logits(2).requires_grad_(), logits(3)
    ids, log_probs = top(theirs, 4, 1.0)
    options = {"beta": BETA, "temperature": 1.3, "chunk_tokens": chunk}
    assert torch.autograd.gradcheck(lambda x: full_divergence(x, theirs, kind, **options), (ours,))
    assert torch.autograd.gradcheck(
        lambda x: top_k_divergence(x, ids, log_probs, kind, **options), (ours,)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_is_a_lower_bound_and_exact_for_the_whole_vocabulary(kind: Divergence) -> None:
    ours, theirs = logits(4).requires_grad_(), logits(5)
    exact = full_divergence(ours, theirs, kind, beta=BETA)
    (slope,) = torch.autograd.grad(exact.sum(), ours)
    below = torch.zeros_like(exact)
    for k in (1, 4, VOCABULARY):
        got = top_k_divergence(ours, *top(theirs, k, 1.0), kind, beta=BETA)
        assert (got >= below - 1e-12).all()
        assert (got <= exact + 1e-12).all()
        below = got.detach()
    torch.testing.assert_close(below, exact.detach())
    torch.testing.assert_close(torch.autograd.grad(got.sum(), ours)[0], slope)


@pytest.mark.parametrize("kind", KINDS)
def test_what_neither_can_sample_adds_nothing(kind: Divergence) -> None:
    ours, theirs = logits(6).float(), logits(7).float()
    ours[:, -2:] = theirs[:, -2:] = -torch.inf
    ours.requires_grad_()
    full = full_divergence(ours, theirs, kind, beta=BETA)
    wide = full_divergence(ours, theirs[:, :-2], kind, beta=BETA)
    bounded = top_k_divergence(ours, *top(theirs, VOCABULARY - 2, 1.0), kind, beta=BETA)
    torch.testing.assert_close(full, wide)
    torch.testing.assert_close(full, bounded)
    (slope,) = torch.autograd.grad((full + bounded).sum(), ours)
    assert slope.isfinite().all()
    assert slope[:, :-2].abs().sum() > 0


def test_the_rest_of_a_server_s_log_probs() -> None:
    log_probs = torch.tensor([[0.5, 0.25], [1.0, 0.0]]).log()
    assert rest_of(log_probs).exp().tolist() == pytest.approx([0.25, 1e-7])


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match=r"K tokens need K \+ 1 log-probs"):
        top_k_divergence(logits(0), torch.zeros(TOKENS, 3), torch.zeros(TOKENS, 3), "jsd")
