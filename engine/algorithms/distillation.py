"""Divergences of a student's distribution over tokens from a teacher's.

p is the student's distribution, q the teacher's; no gradient flows to q:

    reverse_kl  Σ p (log p − log q)   leaves out what the teacher finds unlikely
    forward_kl  Σ q (log q − log p)   covers all that the teacher does
    jsd         β KL(q ‖ m) + (1−β) KL(p ‖ m), m = βq + (1−β)p

Over the whole vocabulary, or over the teacher's K likeliest tokens and one class of all others: a
divergence of such classes is at most that of the distributions, and the same where K is the
vocabulary. Source: generalised knowledge distillation, arXiv 2306.13649, eq. 1 to 3.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from engine.algorithms.chunks import map_token_chunks
from engine.errors import DataError

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
