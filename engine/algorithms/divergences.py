"""Distances between distributions over tokens: KL to the reference, entropy, and distillation.

Estimates of KL from log-probs of sampled tokens, exact KL and entropy over the vocabulary in
chunks of tokens, and divergences of a student from its teachers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.algorithms.masked import at_least_float, mask_out
from engine.errors import ConfigError, DataError

# Functions of single tokens over vocabulary-wide tensors, a bounded number of tokens at a time.


def map_token_chunks(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    mask: Tensor | None,
    chunk_tokens: int,
) -> Tensor:
    """Apply `function([n, X], …) -> [n]` to inputs `[..., X]`, giving `[...]`.

    Only tokens inside `mask [...]` are computed; the others give 0 and get gradient 0, even where
    inputs hold NaN. Intermediates of `function` are recomputed in the backward pass, so that at
    most `chunk_tokens` rows of them exist at once.
    """
    shape = inputs[0].shape[:-1]
    rows = [x.reshape(-1, x.shape[-1]) for x in inputs]
    if mask is not None:
        inside = mask.reshape(-1).bool().nonzero().squeeze(1)
        rows = [x.index_select(0, inside) for x in rows]
    pieces = [
        checkpoint(function, *parts, use_reentrant=False)
        for parts in zip(*(x.split(chunk_tokens) for x in rows), strict=True)
        if parts[0].shape[0]
    ]
    if not pieces:
        return torch.zeros(shape, device=rows[0].device, dtype=torch.float32)
    out = torch.cat(pieces)
    if mask is None:
        return out.reshape(shape)
    full = torch.zeros(mask.numel(), dtype=out.dtype, device=out.device)
    return full.index_put((inside,), out).reshape(shape)


# Entropy of next-token distributions, and the sum of their squared probabilities.


def entropy(
    logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
) -> Tensor:
    """−Σ_v π(v)·log π(v) in nats of logits `[..., V]` → `[...]`, with its exact gradient.

    Softmaxes exist for `chunk_tokens` tokens at a time, in the backward pass too. Tokens with
    logit −inf add 0. Where `mask [...]` is 0 the result is 0.
    """

    def chunk(part: Tensor) -> Tensor:
        log_probs = torch.log_softmax(at_least_float(part) / temperature, -1)
        possible = log_probs > -torch.inf
        return -(log_probs.exp() * torch.where(possible, log_probs, 0.0)).sum(-1)

    return map_token_chunks(chunk, (logits,), mask, chunk_tokens)


def sum_pi_squared(
    logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
) -> Tensor:
    """Σ_v π(v)² of logits `[..., V]` → `[...]`, for the optimal token baseline."""

    def chunk(part: Tensor) -> Tensor:
        return torch.softmax(at_least_float(part) / temperature, -1).square().sum(-1)

    return map_token_chunks(chunk, (logits,), mask, chunk_tokens)


# Per-token estimates of KL(π ‖ π_ref) from log-probs of sampled tokens.


def k1(d: Tensor) -> Tensor:
    """d: unbiased, of high variance, negative on some tokens."""
    return d


def absolute(d: Tensor) -> Tensor:
    """|d|."""
    return d.abs()


def k2(d: Tensor) -> Tensor:
    """d²/2: biased, of low variance; its gradient is an unbiased gradient of the KL."""
    return 0.5 * d.square()


def k3(d: Tensor) -> Tensor:
    """e^{−d} + d − 1 ≥ 0: unbiased and of low variance; clamped to ±10, d to ±20."""
    d = d.clamp(-20.0, 20.0)
    # expm1 keeps the sum of nearly cancelling terms from going below zero near d = 0.
    return (torch.expm1(-d) + d).clamp(-10.0, 10.0)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "kl": k1,
    "abs": absolute,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
}
NAMES: tuple[str, ...] = (*_ESTIMATORS, *(f"{name}+" for name in _ESTIMATORS), "full")
"""`full` is exact over the vocabulary and needs logits: see `engine.algorithms.divergences`."""


def check_kind(kind: str) -> None:
    """Raise ConfigError when `kind` is not the name of an estimator."""
    if kind not in NAMES:
        raise ConfigError(f"KL estimator {kind!r} is unknown; use one of {', '.join(NAMES)}")


def kl_estimate(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    kind: str = "low_var_kl",
    mask: Tensor | None = None,
) -> Tensor:
    """Estimate KL(π ‖ π_ref) at each token, `[B, T]`, with d = log π − log π_ref.

    kinds: k1 = kl: d · abs: |d| · k2 = mse: d²/2 · k3 = low_var_kl: e^{−d} + d − 1.
    A suffix `+` keeps the value and takes the gradient of k2, which is the unbiased gradient of
    the KL when the tokens are sampled from π. Reference log-probs get no gradient.
    With `mask [B, T]` the result is 0 outside it whatever the inputs are there; without, entries
    outside must be finite, or their gradient is not.
    Source: Schulman, "Approximating KL Divergence" (2020).
    Raises ConfigError for an unknown kind or `full`, DataError for unequal shapes.
    """
    check_kind(kind)
    if kind == "full":
        raise ConfigError(
            "KL estimator 'full' needs the distributions over the vocabulary; "
            "use engine.algorithms.divergences.full_kl with logits"
        )
    if log_probs.shape != ref_log_probs.shape:
        raise DataError(
            f"log_probs {list(log_probs.shape)} and ref_log_probs {list(ref_log_probs.shape)} "
            "differ in shape"
        )
    d = at_least_float(log_probs) - at_least_float(ref_log_probs.detach())
    if mask is not None:
        # Cleaning d, where all estimators are 0 and have finite slopes, cleans both directions.
        d = mask_out(mask, d)
    value = _ESTIMATORS[kind.removesuffix("+")](d)
    if not kind.endswith("+"):
        return value
    gradient = k2(d)
    return gradient - gradient.detach() + value.detach()


class FixedKL:
    """A KL coefficient that stays as it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, samples: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state_dict`."""
        self.value = float(state["value"])


class AdaptiveKL(FixedKL):
    """A KL coefficient that is steered until the KL is at its target.

    Source: Ziegler et al., arXiv 1909.08593, section 2.2. The state belongs into checkpoints: a
    resumed run would otherwise start from the first coefficient again.
    """

    def __init__(self, kl_coef: float, target_kl: float, horizon: int) -> None:
        """Raise ConfigError when target or horizon are not above 0."""
        super().__init__(kl_coef)
        if target_kl <= 0 or horizon <= 0:
            raise ConfigError(
                f"kl_ctrl.target_kl={target_kl} and kl_ctrl.horizon={horizon} must be above 0"
            )
        self.target_kl, self.horizon = target_kl, horizon

    def update(self, current_kl: float, samples: int) -> None:
        """β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon) after n samples (completions).

        Raises DataError when the KL is not finite: β would be lost for good.
        """
        if not math.isfinite(current_kl):
            raise DataError(
                f"KL to the reference is {current_kl}; look at the log-probs of policy and "
                "reference on the tokens inside the mask"
            )
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        # A floor, since more samples at once than five horizons would turn β to 0 or negative.
        self.value *= max(0.1, 1 + error * samples / self.horizon)


# KL(π ‖ π_ref) exact over the vocabulary, in chunks of tokens.
#
# Estimates from sampled tokens are in `algorithms.kl`.


def full_kl(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
) -> Tensor:
    """Σ_v π(v)·(log π(v) − log π_ref(v)) of logits `[..., V]` → `[...]`, float32 or float64.

    The gradient is exact, and none flows to the reference. Softmaxes exist for `chunk_tokens`
    tokens at a time, in the backward pass too. Where `mask [...]` is 0 the result is 0.
    Raises DataError for unequal shapes.
    """
    if logits.shape != ref_logits.shape:
        raise DataError(
            f"logits {list(logits.shape)} and ref_logits {list(ref_logits.shape)} differ in shape"
        )

    def chunk(ours: Tensor, theirs: Tensor) -> Tensor:
        return _kl(ours, theirs, temperature)

    return map_token_chunks(chunk, (logits, ref_logits.detach()), mask, chunk_tokens)


def _kl(logits: Tensor, ref_logits: Tensor, temperature: float) -> Tensor:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    ours = torch.log_softmax(logits.to(wide) / temperature, -1)
    theirs = torch.log_softmax(ref_logits.to(wide) / temperature, -1)
    # A token that neither can sample (logit −inf, e.g. a padded vocabulary) adds 0, not NaN.
    possible = ours > -torch.inf
    gap = torch.where(possible, ours, 0.0) - torch.where(possible, theirs, 0.0)
    return (ours.exp() * gap).sum(-1)


# Divergences of a student's distribution over tokens from a teacher's.
#
# p is the student's distribution, q the teacher's; no gradient flows to q:
#
#     reverse_kl  Σ p (log p − log q)   leaves out what the teacher finds unlikely
#     forward_kl  Σ q (log q − log p)   covers all that the teacher does
#     jsd         β KL(q ‖ m) + (1−β) KL(p ‖ m), m = βq + (1−β)p
#
# Over the whole vocabulary, or over the teacher's K likeliest tokens and one class of all others:
# a divergence of such classes is at most that of the distributions, and the same where K is the
# vocabulary. Source: generalised knowledge distillation, arXiv 2306.13649, eq. 1 to 3.

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
_NEVER = -1e30  # log-prob of what can't be; finite, so that 0 times it is 0


def divergence(student: Tensor, teacher: Tensor, kind: Divergence, beta: float = 0.5) -> Tensor:
    """The divergence `[…]` of log-probs over C classes `[…, C]`; `beta` in (0, 1) is jsd's."""
    p, q = student.clamp_min(_NEVER), teacher.detach().clamp_min(_NEVER)
    if kind == "reverse_kl":
        return (p.exp() * (p - q)).sum(-1)
    if kind == "forward_kl":
        return (q.exp() * (q - p)).sum(-1)
    shares = torch.tensor([beta, 1 - beta], dtype=p.dtype, device=p.device).log()
    m = torch.logaddexp(q + shares[0], p + shares[1])
    return beta * (q.exp() * (q - m)).sum(-1) + (1 - beta) * (p.exp() * (p - m)).sum(-1)


def full_divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    kind: Divergence,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
) -> Tensor:
    """The divergence `[N]` of softmax(logits / temperature) of logits `[N, V]`.

    Where one of the two has more columns (a padded vocabulary), those are left out of both.
    """
    width = min(logits.shape[-1], teacher_logits.shape[-1])

    def chunk(ours: Tensor, theirs: Tensor) -> Tensor:
        p, q = (_log_softmax(x[:, :width], temperature) for x in (ours, theirs))
        return divergence(p, q, kind, beta)

    return map_token_chunks(chunk, (logits, teacher_logits.detach()), None, chunk_tokens)


def top_k_divergence(
    logits: Tensor,
    ids: Tensor,
    log_probs: Tensor,
    kind: Divergence,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
) -> Tensor:
    """The divergence `[N]` of softmax(logits / temperature) of logits `[N, V]`, over K + 1 classes.

    `ids` `[N, K]` are the teacher's tokens, `log_probs` `[N, K+1]` theirs and, last, that of all
    other tokens together. Raises DataError for shapes that don't fit.
    """
    if log_probs.shape != (*ids.shape[:-1], ids.shape[-1] + 1):
        raise DataError(
            f"ids {list(ids.shape)} and log_probs {list(log_probs.shape)} don't fit: K tokens need "
            "K + 1 log-probs, the last of all others together"
        )

    def chunk(ours: Tensor, tokens: Tensor, theirs: Tensor) -> Tensor:
        p = with_rest(_log_softmax(ours, temperature), tokens.long())
        return divergence(p, theirs.to(p.dtype), kind, beta)

    return map_token_chunks(chunk, (logits, ids, log_probs.detach()), None, chunk_tokens)


def with_rest(log_p: Tensor, ids: Tensor) -> Tensor:
    """Log-probs `[…, K+1]` of the tokens `ids` `[…, K]` and of all others together, of log-probs
    over the vocabulary `[…, V]`."""
    log_p = log_p.clamp_min(_NEVER)
    rest = log_p.scatter(-1, ids, _NEVER).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids), rest], -1)


def rest_of(log_probs: Tensor) -> Tensor:
    """The log-prob `[…]` of all tokens but those with `log_probs` `[…, K]`.

    1 − Σ, of which float32 log-probs leave about seven digits; at least 1e-7 of it.
    """
    left = 1 - log_probs.double().exp().sum(-1)
    return left.clamp_min(1e-7).log().to(log_probs.dtype)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide / temperature, -1)
