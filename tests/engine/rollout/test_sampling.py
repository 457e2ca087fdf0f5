"""Properties of drawing tokens: noise by place, never a masked token, right log-probs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from engine.rollout.protocol import SamplingParams
from engine.rollout.sampling import noise_keys, sample, uniforms

logits_rows = st.integers(2, 40).flatmap(
    lambda size: st.lists(
        st.one_of(st.floats(-30, 30), st.just(float("-inf")), st.floats(-0.01, 0.01)),
        min_size=size,
        max_size=size,
    ).filter(lambda row: max(row) > -1e30)
)
noises = st.one_of(st.sampled_from([0.0, 1 - 2**-24, 0.5]), st.floats(0, 1 - 2**-24, width=32))


def kept_mass(probs: Tensor, top_p: float) -> float:
    """Mass of the smallest set of the likeliest tokens that holds `top_p`, in float64."""
    mass = 0.0
    for prob in probs.sort(descending=True).values.tolist():
        if top_p < 1 and mass >= top_p and mass > 0:
            break
        mass += prob
    return mass


@given(
    row=logits_rows,
    noise=noises,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-6]),
)
@example(row=[-1e-9, 0.0, 0.0], noise=0.0, temperature=1.0, top_k=0, top_p=0.5)
def test_draws_only_kept_tokens_with_their_log_probs(
    row: list[float], noise: float, temperature: float, top_k: int, top_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = torch.tensor([row])
    token, log_prob = sample(logits, torch.tensor([noise]), params)
    probs = torch.softmax(logits[0].double() / temperature, -1)
    chosen = float(probs[token[0]])
    assert chosen > 0
    scaled = logits[0] / temperature  # what ties in float32 has no order
    assert not top_k or int((scaled > scaled[token[0]]).sum()) < top_k
    likelier = probs[probs > chosen * (1 + 1e-4)]
    ranked = probs.sort(descending=True).values[: top_k or None]
    assert len(likelier) == 0 or float(likelier.sum() / ranked.sum()) < top_p + 1e-5
    # Rounding may move a token across the edge of the nucleus, and its mass with it.
    most = math.log(chosen / float(ranked.sum()) / kept_mass(ranked / ranked.sum(), top_p - 1e-5))
    least = math.log(chosen / float(ranked.sum()) / kept_mass(ranked / ranked.sum(), top_p + 1e-5))
    # float32 of a far-off tail; below 2^-126 its probabilities are whole multiples of 2^-149.
    slack = 1e-4 + 1e-5 * abs(most) + 2.0**-149 / chosen
    assert least - slack < float(log_prob[0]) < most + slack


@pytest.mark.parametrize("size", [7, 512, 50_000])
def test_no_token_of_probability_zero_at_the_edges(size: int) -> None:
    """Leading, trailing and inner zeros, with noise at both ends of its range and just beyond."""
    logits = torch.full((3, size), float("-inf"))
    logits[0, size // 2 :] = 0.0
    logits[1, : size // 2] = 0.0
    logits[2, ::3] = torch.linspace(-20, 0, len(range(0, size, 3)))
    for value in (0.0, 2.0**-24, 0.5, 1 - 2.0**-24, 1.0):
        token, log_prob = sample(logits, torch.full((3,), value), SamplingParams())
        assert (logits.gather(1, token[:, None]) > float("-inf")).all()
        assert log_prob.isfinite().all()


def test_greedy_takes_the_likeliest_and_ignores_noise() -> None:
    logits = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    token, log_prob = sample(logits, None, SamplingParams(temperature=0, top_k=2, top_p=0.1))
    assert torch.equal(token, logits.argmax(-1))
    assert torch.allclose(log_prob, logits.log_softmax(-1).max(-1).values, atol=1e-6)


def test_nan_logits_give_nan_log_probs() -> None:
    logits = torch.zeros(2, 9)
    logits[1, 4] = float("nan")
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
    ):
        _, log_prob = sample(logits, torch.tensor([0.3, 0.3]), params)
        assert log_prob.isnan().tolist() == [False, True]


def test_noise_is_uniform_and_uncorrelated() -> None:
    row = torch.arange(200)
    keys = noise_keys(0, row // 8, row % 8)
    grid = torch.stack([uniforms(keys, torch.full_like(keys, p)) for p in range(100)])
    assert (grid >= 0).all()
    assert (grid < 1).all()
    counts = torch.histc(grid, bins=50, min=0, max=1)
    chi_square = float(((counts - 400) ** 2 / 400).sum())
    assert 20 < chi_square < 95  # 49 degrees of freedom
    assert torch.corrcoef(grid).fill_diagonal_(0).abs().max() < 0.35  # over positions
    assert torch.corrcoef(grid.T).fill_diagonal_(0).abs().max() < 0.5  # over rows


@given(seed=st.integers(-(2**70), 2**70), prompt=st.integers(0, 10**6), j=st.integers(0, 10**4))
def test_noise_depends_on_place_alone(seed: int, prompt: int, j: int) -> None:
    alone = noise_keys(seed, torch.tensor([prompt]), torch.tensor([j]))
    among = noise_keys(seed, torch.tensor([0, prompt, 7]), torch.tensor([1, j, 7]))
    assert alone[0] == among[1]
    assert uniforms(alone, torch.tensor([3]))[0] == uniforms(among, torch.tensor([0, 3, 9]))[1]
    others = noise_keys(seed + 1, torch.tensor([prompt]), torch.tensor([j]))
    assert others[0] != alone[0]


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_a_large_vocabulary_is_inverted_as_a_small_one(scale: float) -> None:
    """The drawn token's share of the distribution holds the noise, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(400, 5003, generator=generator)
    noise = torch.rand(400, generator=generator)
    token, log_prob = sample(logits, noise, SamplingParams())
    probs = logits.double().softmax(-1)
    after = probs.cumsum(-1).gather(1, token[:, None])[:, 0]
    chosen = probs.gather(1, token[:, None])[:, 0]
    assert (after - chosen - 1e-5 < noise).all()
    assert (noise < after + 1e-5).all()
    assert torch.allclose(log_prob.double(), chosen.log(), atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
def test_top_p_keeps_the_same_however_many_tokens_it_takes(scale: float) -> None:
    """It keeps from a handful of candidates to almost all tokens."""
    generator = torch.Generator().manual_seed(1)
    logits = scale * torch.randn(64, 3000, generator=generator)
    noise = torch.rand(64, generator=generator)
    token, log_prob = sample(logits, noise, SamplingParams(top_p=0.9))
    probs = logits.double().softmax(-1)
    for row, index, given_log_prob in zip(probs, token, log_prob, strict=True):
        chosen = float(row[index])
        assert float(row[row > chosen].sum()) < 0.9
        expected = math.log(chosen / kept_mass(row, 0.9))
        assert float(given_log_prob) == pytest.approx(expected, abs=2e-3)
