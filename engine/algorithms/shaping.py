"""Changing rewards before they become advantages.

What lives here: overlong penalty, KL inside the reward, weights of components, clipping,
whitening, placing a completion's score, finding its last turn. What does not: choosing which
groups to keep (`algorithms.dynamic_sampling`) and the KL estimators (`algorithms.kl`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.algorithms.masked import at_least_float, mask_out, masked_whiten
from engine.errors import ConfigError, DataError


def on_last_token(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Put each completion's score `[B]` on its last token inside the mask: `[B, T]`."""
    mask = response_mask.bool()
    last = mask & (mask.long().flip(1).cumsum(1).flip(1) == 1)
    return mask_out(last, at_least_float(scores)[:, None].expand(mask.shape))


def last_turn(response_mask: Tensor) -> Tensor:
    """The last run of tokens inside the mask `[B, T]`, bool: what was sampled without a break."""
    mask = response_mask.bool()
    after = mask.long().flip(1).cumsum(1).flip(1)  # tokens inside the mask from here on
    gaps = (~mask & (after > 0)).long().flip(1).cumsum(1).flip(1)  # gaps that more tokens follow
    return mask & (gaps == 0)


def overlong_penalty(
    lengths: Tensor, max_response_length: int, overlong_buffer_len: int, penalty_factor: float = 1.0
) -> Tensor:
    """min(−(len − (L_max − buf))/buf·factor, 0): from 0 at L_max − buf to −factor at L_max, `[B]`.

    Source: DAPO, arXiv 2503.14476, eq. 13. Raises ConfigError for a buffer outside 1..L_max or a
    negative factor.
    """
    if not 1 <= overlong_buffer_len <= max_response_length:
        raise ConfigError(
            f"overlong_buffer.len={overlong_buffer_len} must be between 1 and "
            f"max_response_length={max_response_length}"
        )
    if penalty_factor < 0:
        raise ConfigError(f"overlong_buffer.penalty_factor={penalty_factor} must not be negative")
    exceeded = at_least_float(lengths) - (max_response_length - overlong_buffer_len)
    return (-exceeded / overlong_buffer_len * penalty_factor).clamp(max=0.0)


def kl_in_reward(
    token_level_scores: Tensor, kl: Tensor, response_mask: Tensor, kl_coef: float
) -> Tensor:
    """r_t = score_t − β·KL_t inside the mask, 0 outside, `[B, T]`, without gradient.

    Source: Ziegler et al., arXiv 1909.08593, eq. 2.
    """
    rewards = at_least_float(token_level_scores) - kl_coef * at_least_float(kl)
    return mask_out(response_mask, rewards.detach())


def weigh_components(components: Tensor, weights: Sequence[float]) -> Tensor:
    """Σ_k w_k·component_k: `[B, K]` → `[B]`. A weight of 0 ignores its component, even NaN.

    Raises DataError when the number of weights is not K.
    """
    if components.dim() != 2 or components.shape[1] != len(weights):
        raise DataError(
            f"reward components have shape {list(components.shape)} for {len(weights)} weights; "
            "give one weight a component"
        )
    scale = torch.tensor(list(weights), dtype=components.dtype, device=components.device)
    return (mask_out(scale != 0, components) * scale).sum(1)


def clip_rewards(rewards: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """Limit rewards of any shape to [low, high]; raise ConfigError when low > high."""
    if low is not None and high is not None and low > high:
        raise ConfigError(f"reward clip range [{low}, {high}] is empty; set low below high")
    return rewards if low is None and high is None else rewards.clamp(low, high)


def whiten_rewards(
    token_level_rewards: Tensor, response_mask: Tensor, *, shift_mean: bool = False
) -> Tensor:
    """Scale token rewards `[B, T]` to unit variance over the mask; the mean stays by default.

    Source: Ziegler et al., arXiv 1909.08593 (rewards keep their mean, so that signs do).
    """
    rewards = at_least_float(token_level_rewards)
    return masked_whiten(rewards, response_mask, shift_mean=shift_mean)
