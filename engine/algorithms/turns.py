"""Turns within responses: which tokens the policy sampled together, over an episode's rows.

A turn is a run of tokens inside the mask. What lies between (a tool's or user's turn) belongs to
none. An episode is a row, or several rows that go on from each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithms.masked import mask_out


@dataclass(frozen=True, slots=True)
class Turns:
    """E episodes of up to K turns each."""

    episode: Tensor  # [B] long, 0 … E-1: of each row
    number: Tensor  # [B, T] long: turn within the episode; meaningless outside the mask
    mask: Tensor  # [B, T] bool
    present: Tensor  # [E, K] bool: turns that there are

    @staticmethod
    def of(
        response_mask: Tensor, episode_ids: Tensor | None = None, first_turn: Tensor | None = None
    ) -> Turns:
        """Find the turns of `response_mask` `[B, T]`.

        Rows with one of `episode_ids` `[B]` are one episode (None: each row is), and `first_turn`
        `[B]` is the number of a row's first turn.
        """
        mask = response_mask.bool()
        rows = mask.shape[0]
        if episode_ids is None:
            episode = torch.arange(rows, device=mask.device)
        else:
            episode = torch.unique(episode_ids, return_inverse=True)[1]
        before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
        number = (mask & ~before).long().cumsum(1) - 1
        if first_turn is not None:
            number = number + first_turn[:, None]
        number = number.clamp(min=0)
        episodes = int(episode.max()) + 1 if rows else 0
        turns = int(number[mask].max()) + 1 if bool(mask.any()) else 1
        present = torch.zeros(episodes, turns, dtype=torch.bool, device=mask.device)
        present[episode[:, None].expand_as(mask)[mask], number[mask]] = True
        return Turns(episode, number, mask, present)

    def sum(self, x: Tensor) -> Tensor:
        """Σ of `x` `[B, T]` over the tokens of each turn, `[E, K]`."""
        out = torch.zeros(self.present.shape, dtype=x.dtype, device=x.device)
        where = self.episode[:, None].expand_as(self.mask)[self.mask], self.number[self.mask]
        return out.index_put(where, x[self.mask], accumulate=True)

    def first(self, x: Tensor) -> Tensor:
        """`x` `[B, T]` at the first token of each turn, `[E, K]`; 0 where there is no turn."""
        before = torch.nn.functional.pad(self.mask, (1, 0))[:, :-1]
        starts = mask_out(self.mask & ~before, x)
        return self.sum(starts)

    def to_tokens(self, x: Tensor) -> Tensor:
        """`x` `[E, K]` on all tokens of each turn, `[B, T]`; 0 outside the mask."""
        return mask_out(self.mask, x[self.episode[:, None], self.number])
