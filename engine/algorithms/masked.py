"""Arithmetic under a mask, within groups and over turns; entries outside the mask never matter.

They may be NaN or infinite: they are replaced before arithmetic, not multiplied by zero, so they
touch neither results nor gradients.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


def mask_out(mask: Tensor, x: Tensor, fill: float = 0.0) -> Tensor:
    """Return `x` where `mask` is non-zero and `fill` elsewhere. Shapes must broadcast."""
    return torch.where(mask.bool(), x, torch.full((), fill, dtype=x.dtype, device=x.device))


def at_least_float(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is an integer or half-precision tensor, else as it is."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return Σ x·m over `dim` (all dimensions when None)."""
    return mask_out(mask, x).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return Σ x·m / Σ m over `dim`; 0 where the mask is empty."""
    return masked_sum(x, mask, dim) / mask.bool().sum(dim).clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Return the variance (Bessel's) inside the mask (scalar); 0 for fewer than two entries."""
    mask = mask.bool()
    count = mask.sum()
    squares = masked_sum((mask_out(mask, x) - masked_mean(x, mask)).square(), mask)
    variance = squares / (count - 1).clamp(min=1)
    return torch.where(count > 1, variance, torch.zeros_like(variance))


def safe_divide(x: Tensor, y: Tensor) -> Tensor:
    """Return x / y, and 0 (also as the gradient) where y is 0."""
    zero = y == 0
    return torch.where(zero, torch.zeros_like(x), x / torch.where(zero, torch.ones_like(y), y))


def masked_whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Return (x − μ)/√(var + 1e-8) inside the mask, 0 outside; `shift_mean=False` keeps the mean.

    The variance has Bessel's correction. With one entry the result is 0 (or its mean).
    """
    mean = masked_mean(x, mask)
    white = (mask_out(mask, x) - mean) * torch.rsqrt(masked_var(x, mask) + 1e-8)
    return mask_out(mask, white if shift_mean else white + mean)


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return G_t = r_t + γ·G_next over the tokens inside the mask, `[B, T]`.

    A masked token (a tool's or user's turn) carries the return of the policy's next token.
    """
    rewards, mask = mask_out(mask, rewards), mask.bool()
    running = torch.zeros_like(rewards[:, 0]) if rewards.shape[1] else rewards.sum(1)
    out = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, running)
        out[:, t] = running
    return out


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows sorted into groups: `index [B]` in 0..G-1, `size [G]`; rows may be left out."""

    index: Tensor
    size: Tensor
    rows: Tensor  # [B] bool; rows that count: the others are left out of group statistics

    @classmethod
    def of(cls, group_ids: Tensor, rows: Tensor | None = None) -> Self:
        """Number the groups of `group_ids [B]` (any integers, any order)."""
        _, index = torch.unique(group_ids, return_inverse=True)
        rows = torch.ones_like(index, dtype=torch.bool) if rows is None else rows.bool()
        groups = int(index.max()) + 1 if index.numel() else 0
        size = torch.zeros(groups, dtype=torch.long, device=index.device)
        return cls(index, size.scatter_add(0, index, rows.long()), rows)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sums of the rows of `x [B, ...]` by group, `[G, ...]`."""
        rows = self.rows.reshape(-1, *[1] * (x.dim() - 1))
        out = torch.zeros(len(self.size), *x.shape[1:], dtype=x.dtype, device=x.device)
        return out.index_add(0, self.index, mask_out(rows, x))

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of `x [B]` by group, `[G]`; exact where a group's rows are equal."""
        # Summing differences to one of the rows makes equal rows give their value to the last
        # bit, where a plain sum over n would leave rounding that later looks like a signal.
        origin = self.min(x)
        shifted = self.sum(x - origin[self.index])
        return origin + shifted / self.size.clamp(min=1)

    def std(self, x: Tensor) -> Tensor:
        """Return the standard deviation (Bessel's) by group, `[G]`; 0 for a group of one."""
        squares = self.sum((x - self.mean(x)[self.index]).square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt()

    def max(self, x: Tensor) -> Tensor:
        """Return the largest of `x [B]` by group, `[G]`; 0 for a group without rows."""
        return self._extreme(x, "amax", -torch.inf)

    def min(self, x: Tensor) -> Tensor:
        """Return the smallest of `x [B]` by group, `[G]`; 0 for a group without rows."""
        return self._extreme(x, "amin", torch.inf)

    def range(self, x: Tensor) -> Tensor:
        """Return max − min by group, `[G]`: exactly 0 where all rows of a group are equal."""
        return self.max(x) - self.min(x)

    def _extreme(self, x: Tensor, reduce: str, start: float) -> Tensor:
        out = torch.full((len(self.size),), start, dtype=x.dtype, device=x.device)
        out = out.scatter_reduce(0, self.index, mask_out(self.rows, x, start), reduce)
        return mask_out(self.size > 0, out)


@dataclass(frozen=True, slots=True)
class Turns:
    """E episodes of up to K turns each; an episode is a row, or several that go on from each other.

    A turn is a run of tokens inside the mask, which the policy sampled together. What lies between
    (a tool's or user's turn) belongs to none.
    """

    episode: Tensor  # [B] long, 0 … E-1: of each row
    number: Tensor  # [B, T] long: turn within the episode; meaningless outside the mask
    mask: Tensor  # [B, T] bool
    present: Tensor  # [E, K] bool: turns that there are

    @classmethod
    def of(
        cls, response: Tensor, episode_ids: Tensor | None = None, first_turn: Tensor | None = None
    ) -> Self:
        """Find the turns of a `response` mask `[B, T]`.

        `episode_ids` `[B]`: rows of one episode have one (None: each is one); `first_turn` `[B]`:
        numbers.
        """
        mask = response.bool()
        rows = mask.shape[0]
        if episode_ids is None:
            episode = torch.arange(rows, device=mask.device)
        else:
            episode = torch.unique(episode_ids, return_inverse=True)[1]
        number = _starts(mask).long().cumsum(1) - 1
        if first_turn is not None:
            number = number + first_turn[:, None]
        number = number.clamp(min=0)
        episodes = int(episode.max()) + 1 if rows else 0
        turns = int(number[mask].max()) + 1 if bool(mask.any()) else 1
        present = torch.zeros(episodes, turns, dtype=torch.bool, device=mask.device)
        present[episode[:, None].expand_as(mask)[mask], number[mask]] = True
        return cls(episode, number, mask, present)

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` `[B, T]` over the tokens of each turn, `[E, K]`."""
        out = torch.zeros(self.present.shape, dtype=x.dtype, device=x.device)
        where = self.episode[:, None].expand_as(self.mask)[self.mask], self.number[self.mask]
        return out.index_put(where, x[self.mask], accumulate=True)

    def first(self, x: Tensor) -> Tensor:
        """Return `x` `[B, T]` at the first token of each turn, `[E, K]`; 0 where there is none."""
        return self.sum(mask_out(_starts(self.mask), x))

    def to_tokens(self, x: Tensor) -> Tensor:
        """Put `x` `[E, K]` on all tokens of each turn, `[B, T]`; 0 outside the mask."""
        return mask_out(self.mask, x[self.episode[:, None], self.number])


def _starts(mask: Tensor) -> Tensor:
    """Return the first token of each run inside the mask [B, T] bool."""
    return mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
