"""Rewards are shaped, and groups without a signal are filtered, before advantages are computed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.algorithms.masked import Groups, at_least_float, mask_out
from engine.errors import ConfigError, DataError


def on_last_token(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Put each completion's score `[B]` on its last token inside the mask: `[B, T]`."""
    mask = response_mask.bool()
    last = mask & (mask.long().flip(1).cumsum(1).flip(1) == 1)
    return mask_out(last, at_least_float(scores)[:, None].expand(mask.shape))


def last_turn(response_mask: Tensor) -> Tensor:
    """Return the last run of tokens inside the mask `[B, T]`, bool: sampled without a break."""
    mask = response_mask.bool()
    after = mask.long().flip(1).cumsum(1).flip(1)  # tokens inside the mask from here on
    gaps = (~mask & (after > 0)).long().flip(1).cumsum(1).flip(1)  # gaps that more tokens follow
    return mask & (gaps == 0)


def overlong_penalty(
    lengths: Tensor, max_response_length: int, overlong_buffer_len: int, penalty_factor: float = 1.0
) -> Tensor:
    """Return a penalty `[B]` that falls from 0 at L_max − buf tokens to −factor at L_max.

    min(−(len − (L_max − buf))/buf·factor, 0). Source: DAPO, arXiv 2503.14476, eq. 13.
    Raises ConfigError for a buffer outside 1..L_max or a negative factor.
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


def without_truncated(response_mask: Tensor, truncated: Tensor) -> Tensor:
    """Return the mask `[B, T]` without the rows that a length limit cut (`truncated [B]`, bool).

    Source: DAPO's overlong filtering, arXiv 2503.14476, 3.4.
    """
    return mask_out(~truncated.bool()[:, None], response_mask)


def kl_in_reward(
    token_level_scores: Tensor, kl: Tensor, response_mask: Tensor, kl_coef: float
) -> Tensor:
    """Return r_t = score_t − β·KL_t inside the mask, 0 outside, `[B, T]`, without gradient.

    Source: Ziegler et al., arXiv 1909.08593, eq. 2.
    """
    rewards = at_least_float(token_level_scores) - kl_coef * at_least_float(kl)
    return mask_out(response_mask, rewards.detach())


def weigh_components(components: Tensor, weights: Sequence[float]) -> Tensor:
    """Return Σ_k w_k·component_k: `[B, K]` → `[B]`; NaN and a weight of 0 leave a component out.

    Raises DataError when the number of weights is not K.
    """
    if components.dim() != 2 or components.shape[1] != len(weights):
        raise DataError(
            f"reward components have shape {list(components.shape)} for {len(weights)} weights; "
            "give one weight a component"
        )
    scale = torch.tensor(list(weights), dtype=components.dtype, device=components.device)
    return (mask_out((scale != 0) & ~components.isnan(), components) * scale).sum(1)


def clip_rewards(rewards: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """Limit rewards of any shape to [low, high]; raise ConfigError when low > high."""
    if low is not None and high is not None and low > high:
        raise ConfigError(f"reward clip range [{low}, {high}] is empty; set low below high")
    return rewards if low is None and high is None else rewards.clamp(low, high)


def groups_with_signal(metric: Tensor, group_ids: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the rows `[B]` (bool) whose group has different values of `metric [B]`.

    `rows [B]` (bool) leaves rows out, e.g. failed rewards: they are never kept and don't count.
    Source: DAPO, arXiv 2503.14476, eq. 11.
    """
    groups = Groups.of(group_ids, rows)
    return (groups.range(metric) > 0)[groups.index] & groups.rows


def first_groups(group_ids: Tensor, keep: Tensor, count: int) -> Tensor:
    """Return indices (int64), in order, of kept rows of the first `count` groups to appear."""
    chosen: dict[int, None] = {}
    for group in group_ids[keep.bool()].tolist():
        chosen.setdefault(int(group))
    ids = torch.tensor(list(chosen)[:count], dtype=group_ids.dtype, device=group_ids.device)
    return (torch.isin(group_ids, ids) & keep.bool()).nonzero().squeeze(1)
