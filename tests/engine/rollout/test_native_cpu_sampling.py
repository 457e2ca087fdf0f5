"""The compiled sampler draws what `sampling.py` draws, by its rule and noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels import decoding_ops
from engine.kernels.decoding_ops import library
from engine.rollout.protocol import SamplingParams
from engine.rollout.sampling import draw, noise_keys, sample, uniforms

pytestmark = pytest.mark.skipif(library() is None, reason="no AVX512-BF16, or no C compiler")
ROWS = 400


def case(vocabulary: int, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits `[R, V]`, keys and columns `[R]`."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = spread * torch.randn(ROWS, vocabulary, generator=generator)
    rows = torch.arange(ROWS)
    return logits, noise_keys(11, rows // 8, rows % 8), rows % 50


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("vocabulary", [1, 5, 79, 256, 512, 4099])
def test_tokens_and_log_probs_are_the_rules(vocabulary: int, temperature: float) -> None:
    logits, keys, columns = case(vocabulary)
    params = SamplingParams(temperature=temperature)
    tokens, log_probs = draw(logits, keys, columns, params)
    expected, _ = sample(logits, uniforms(keys, columns), params)
    assert (tokens == expected).float().mean() > 0.99  # sums round in another order
    exact = (logits.double() / (temperature or 1.0)).log_softmax(-1).gather(1, tokens[:, None])
    assert torch.allclose(log_probs.double(), exact[:, 0], atol=1e-5)


def test_more_threads_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    one = draw(*case(700), SamplingParams())
    monkeypatch.setattr(decoding_ops, "_ROWS_OF_TWO", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    several = draw(*case(700), SamplingParams())
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))


def test_what_is_impossible_is_never_drawn() -> None:
    logits, keys, columns = case(600)
    logits[:, ::2] = -torch.inf
    logits[:, 300:] = -torch.inf
    tokens, log_probs = draw(logits, keys, columns, SamplingParams())
    assert (tokens % 2 == 1).all()
    assert (tokens < 300).all()
    assert log_probs.isfinite().all()


def test_a_nan_is_told_by_its_log_prob() -> None:
    logits, keys, columns = case(79)
    logits[3, 40] = torch.nan
    logits[5] = torch.inf
    for temperature in (1.0, 0.0):
        tokens, log_probs = draw(logits, keys, columns, SamplingParams(temperature=temperature))
        assert log_probs.isnan().nonzero()[:, 0].tolist() == [3, 5]
        assert ((tokens >= 0) & (tokens < 79)).all()
