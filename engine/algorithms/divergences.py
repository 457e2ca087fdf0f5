"""Distances between distributions over tokens: KL to the reference, and distillation."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.algorithms import checks
from engine.algorithms.masked import at_least_float, mask_out
from engine.errors import ConfigError, DataError


def map_token_chunks(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], chunk_tokens: int
) -> Tensor:
    """Apply `function([n, X], …) -> [n]` to inputs `[..., X]`, giving `[...]`.

    Intermediates of `function` are recomputed in the backward pass, so that at most `chunk_tokens`
    rows of them exist at once.
    """
    shape, rows = inputs[0].shape[:-1], [x.reshape(-1, x.shape[-1]) for x in inputs]
    if not len(rows[0]):
        return torch.zeros(shape, device=rows[0].device, dtype=torch.float32)
    pieces = [
        checkpoint(function, *parts, use_reentrant=False)
        for parts in zip(*(x.split(chunk_tokens) for x in rows), strict=True)
    ]
    return torch.cat(pieces).reshape(shape)


def k1(d: Tensor) -> Tensor:
    """Return d: unbiased, of high variance, negative on some tokens."""
    return d


def k2(d: Tensor) -> Tensor:
    """Return d²/2: biased, of low variance; its gradient is an unbiased gradient of the KL."""
    return 0.5 * d.square()


def k3(d: Tensor) -> Tensor:
    """Return e^{−d} + d − 1 ≥ 0: unbiased, of low variance; clamped to ±10, d to ±20."""
    d = d.clamp(-20.0, 20.0)
    # expm1 keeps the sum of nearly cancelling terms from going below zero near d = 0.
    return (torch.expm1(-d) + d).clamp(-10.0, 10.0)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "kl": k1,
    "abs": torch.abs,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
}
# `full` is exact over the vocabulary and needs logits: see `full_kl`.
NAMES = (*_ESTIMATORS, *(f"{name}+" for name in _ESTIMATORS), "full")


def check_kind(kind: str) -> None:
    """Raise ConfigError when `kind` is not the name of an estimator."""
    if kind not in NAMES:
        raise ConfigError(f"KL estimator {kind!r} is unknown; use one of {', '.join(NAMES)}")


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, kind: str = "low_var_kl", mask: Tensor | None = None
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
    checks.same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
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
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = float(state["value"])


class AdaptiveKL(FixedKL):
    """A KL coefficient that is steered until the KL is at its target; its state is in checkpoints.

    Source: Ziegler et al., arXiv 1909.08593, section 2.2.
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


def full_kl(
    logits: Tensor, ref_logits: Tensor, *, temperature: float = 1.0, chunk_tokens: int = 512
) -> Tensor:
    """KL(π ‖ π_ref), exact over the vocabulary, of logits `[..., V]` → `[...]`, float32 or float64.

    No gradient flows to the reference. Softmaxes exist for `chunk_tokens` tokens at a time, in the
    backward pass too. Raises DataError for unequal shapes.
    """
    checks.same_shape(logits=logits, ref_logits=ref_logits)

    def chunk(policy: Tensor, reference: Tensor) -> Tensor:
        log_p, log_q = (_log_softmax(x, temperature) for x in (policy, reference))
        # A token that neither can sample (logit −inf, e.g. a padded vocabulary) adds 0, not NaN.
        possible = log_p > -torch.inf
        gap = torch.where(possible, log_p, 0.0) - torch.where(possible, log_q, 0.0)
        return (log_p.exp() * gap).sum(-1)

    return map_token_chunks(chunk, (logits, ref_logits.detach()), chunk_tokens)


Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
_NEVER = -1e30  # log-prob of what can't be; finite, so that 0 times it is 0


def divergence(student: Tensor, teacher: Tensor, kind: Divergence, beta: float = 0.5) -> Tensor:
    """Return the divergence `[…]` of a student from its teacher, of log-probs `[…, C]`.

    p is the student's distribution, q the teacher's; no gradient flows to q:

        reverse_kl  Σ p (log p − log q)   leaves out what the teacher finds unlikely
        forward_kl  Σ q (log q − log p)   covers all that the teacher does
        jsd         β KL(q ‖ m) + (1−β) KL(p ‖ m), m = βq + (1−β)p, with β in (0, 1)
    Source: generalised knowledge distillation, arXiv 2306.13649, eq. 1 to 3.
    """
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
    """Return the divergence `[N]` of softmax(logits / temperature) of logits `[N, V]`.

    Where one of the two has more columns (a padded vocabulary), those are left out of both.
    """
    width = min(logits.shape[-1], teacher_logits.shape[-1])

    def chunk(student: Tensor, teacher: Tensor) -> Tensor:
        p, q = (_log_softmax(x[:, :width], temperature) for x in (student, teacher))
        return divergence(p, q, kind, beta)

    return map_token_chunks(chunk, (logits, teacher_logits.detach()), chunk_tokens)


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
    """Return the divergence `[N]` as `full_divergence`, over K + 1 classes, of logits `[N, V]`.

    `ids` `[N, K]` are the teacher's tokens, `log_probs` `[N, K+1]` theirs and, last, that of all
    other tokens together. It is at most the whole vocabulary's, and the same where K is V.
    Raises DataError for shapes that don't fit.
    """
    if log_probs.shape != (*ids.shape[:-1], ids.shape[-1] + 1):
        raise DataError(
            f"ids {list(ids.shape)} and log_probs {list(log_probs.shape)} don't fit: K tokens need "
            "K + 1 log-probs, the last of all others together"
        )

    def chunk(student: Tensor, tokens: Tensor, teacher: Tensor) -> Tensor:
        p = with_rest(_log_softmax(student, temperature), tokens.long())
        return divergence(p, teacher.to(p.dtype), kind, beta)

    return map_token_chunks(chunk, (logits, ids, log_probs.detach()), chunk_tokens)


def with_rest(log_p: Tensor, ids: Tensor) -> Tensor:
    """Return log-probs `[…, K+1]` of tokens `ids` `[…, K]` and of all others, of those `[…, V]`."""
    log_p = log_p.clamp_min(_NEVER)
    rest = log_p.scatter(-1, ids, _NEVER).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids), rest], -1)


def rest_of(log_probs: Tensor) -> Tensor:
    """Return the log-prob `[…]` of all tokens but those with `log_probs` `[…, K]`.

    1 − Σ, of which float32 log-probs leave about seven digits; at least 1e-7 of it.
    """
    left = 1 - log_probs.double().exp().sum(-1)
    return left.clamp_min(1e-7).log().to(log_probs.dtype)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(at_least_float(logits) / temperature, -1)
