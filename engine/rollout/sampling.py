"""Sampling tokens from logits: counter-based noise, and truncation to top-k and top-p.

A token is drawn by inverting the cumulative distribution at a uniform number. That number is a hash
of (seed, prompt index, completion index, position), so neither the
batch a sequence is decoded in nor its slot changes what is drawn.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import triton_kernels
from engine.kernels.decoding_ops import draw_compiled
from engine.rollout.protocol import SamplingParams

_BLOCK = triton_kernels.MASS_BLOCK  # tokens whose probabilities are summed first
_FIRST_CANDIDATES = 64  # tokens that are looked at first for top-p

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def noise_keys(seed: int, prompt_index: Tensor, completion_index: Tensor) -> Tensor:
    """Hash each prompt's and completion's index, int64 `[N]`, to a key `[N]`, int64."""
    root = _mix(torch.tensor(_signed(seed ^ _GOLDEN), device=prompt_index.device))
    return _mix(_mix(root + prompt_index * _signed(_GOLDEN)) + completion_index * _signed(_MIX_1))


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Return float32 numbers in [0, 1) `[R]` for keys `[R]` at token positions `[R]` (int64).

    The generator is SplitMix64 (Steele et al., 2014) used as a counter-based one; 24 bits are kept.
    """
    bits = _shift(_mix(keys + (positions + 1) * _signed(_GOLDEN)), 40)
    return bits.to(torch.float32) * 2.0**-24


def draw(
    logits: Tensor, keys: Tensor, columns: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: tokens int64 `[R]` and their log-probs float32 `[R]`.

    `logits` is `[R, V]`; the noise is that of `keys` at `columns`, both int64 `[R]`. What `sample`
    returns, but for tokens within rounding of another one's share of [0, 1) where the compiled loop
    of CPUs draws.
    """
    truncated = 0 < params.top_k < logits.shape[1] or params.top_p < 1
    if not truncated or params.temperature == 0:
        drawn = draw_compiled(logits, keys, columns, params.temperature)
        if drawn is not None:
            return drawn
    return sample(logits, uniforms(keys, columns), params)


def sample(logits: Tensor, noise: Tensor | None, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token a row: tokens int64 `[R]` and their log-probs float32 `[R]`.

    `logits` is `[R, V]`; `noise` `[R]` in [0, 1) is ignored by greedy decoding. Log-probs are of
    the distribution drawn from: softmax(logits / temperature), cut to `top_k`, then to `top_p`,
    and renormalised; for greedy decoding of softmax(logits). They are logs of float32 numbers, so
    below -87 (a token of probability 1e-38) they are rounded ever more coarsely. A row of logits
    with a NaN gives a NaN log-prob.
    """
    uncut = params.top_p >= 1 and not 0 < params.top_k < logits.shape[-1]
    if uncut and params.temperature and logits.is_cuda and triton_kernels.takes(logits):
        assert noise is not None
        return _sample_uncut(logits, noise, params.temperature)
    logits = logits.float()
    if params.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
        return tokens[:, 0], logits.softmax(-1).gather(1, tokens)[:, 0].log()
    assert noise is not None
    if params.temperature != 1:
        logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        logits, order = logits.topk(params.top_k, dim=-1)  # sorted, most likely first
        probs = _nucleus(logits.softmax(-1), params.top_p)
    elif params.top_p < 1:
        probs, order = _most_likely(logits.softmax(-1), params.top_p)
        probs = _nucleus(probs, params.top_p)
    else:
        choice, log_probs = _invert(logits.softmax(-1), noise)
        return choice[:, 0], log_probs
    choice, log_probs = _invert(probs, noise)
    return order.gather(1, choice)[:, 0], log_probs


def _sample_uncut(logits: Tensor, noise: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample as `_invert_blocks` of softmax(logits / temperature), reading logits once."""
    masses, largest, total = triton_kernels.block_masses(logits, temperature)
    block, _ = _invert(masses, noise)  # [R, 1]
    mass = masses.gather(1, block)
    inside = (noise[:, None] * masses.sum(-1, keepdim=True) - _sum_before(masses, block)) / mass
    columns = block * _BLOCK + torch.arange(_BLOCK, device=block.device)
    in_vocabulary = columns < logits.shape[-1]
    chosen = logits.gather(1, columns.clamp(max=logits.shape[-1] - 1)).float()
    probs = (chosen / temperature - largest).exp_().masked_fill_(~in_vocabulary, 0.0).div_(total)
    index, log_probs = _invert(probs, inside[:, 0].clamp_(0, 1))
    return (block * _BLOCK + index)[:, 0], log_probs


def _sum_before(masses: Tensor, block: Tensor) -> Tensor:
    """Return the sums `[R, 1]` of `masses` `[R, K]` before those at `block` `[R, 1]`."""
    return masses.cumsum(-1).gather(1, block) - masses.gather(1, block)


def _most_likely(probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Sort the largest of `probs` `[R, V]`, few as a rule, that hold mass `top_p`."""
    count, vocabulary = _FIRST_CANDIDATES, probs.shape[-1]
    while count < vocabulary:
        largest, order = probs.topk(count, dim=-1)
        if bool((largest.sum(-1) > top_p).all()):
            return largest, order
        count *= 16
    return probs.sort(dim=-1, descending=True, stable=True)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the shortest prefix of sorted `probs` `[R, K]` with mass `top_p`, renormalised."""
    if top_p >= 1:
        return probs
    mass_before = probs.cumsum(-1) - probs
    drop = mass_before >= top_p
    drop[:, 0] = False  # rounding or a tiny top_p must not empty the set
    probs = probs.masked_fill(drop, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def _invert(probs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index `[R, 1]` where the sum of `probs` `[R, K]` passes `noise`, and its log."""
    if probs.shape[-1] > 2 * _BLOCK:
        return _invert_blocks(probs, noise)
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:].contiguous()
    # Below the last sum: a token of probability 0, which leaves the sum as it is, is never chosen.
    target = torch.minimum(noise[:, None] * total, total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target, right=True).clamp_(max=probs.shape[-1] - 1)
    chosen = probs.gather(1, index)
    if probs.device.type != "cpu":  # a parallel scan need not be monotone
        best, best_index = probs.max(-1, keepdim=True)
        empty = chosen == 0
        index, chosen = torch.where(empty, best_index, index), torch.where(empty, best, chosen)
    return index, chosen[:, 0].log()


def _invert_blocks(probs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Invert blocks of tokens, then tokens: faster than the running sum over a large vocabulary."""
    blocks = F.pad(probs, (0, -probs.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    mass = blocks.sum(-1)  # [R, K / _BLOCK]
    block, _ = _invert(mass, noise)
    mass_before = _sum_before(mass, block)
    inside = (noise * mass.sum(-1) - mass_before[:, 0]) / mass.gather(1, block)[:, 0]
    chosen = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0]
    index, log_probs = _invert(chosen, inside.clamp_(0, 1))
    return block * _BLOCK + index, log_probs


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors (multiplication wraps as on unsigned words)."""
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right logically; torch's `>>` on int64 carries the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """Return the int64 with the low 64 bits of `word`."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
