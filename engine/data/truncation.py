"""Cuts prompts that are too long, as verl's `data.truncation` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Side = Literal["left", "right", "middle"]


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt of more than `limit` tokens is cut: where tokens are taken away."""

    limit: int
    side: Side

    def cut(self, ids: list[int]) -> list[int]:
        """At most `limit` of the tokens: left keeps the last, right the first, middle both ends.

        >>> Truncation(3, "middle").cut([1, 2, 3, 4, 5])
        [1, 4, 5]
        """
        if len(ids) <= self.limit:
            return ids
        kept = {"left": 0, "right": self.limit, "middle": self.limit // 2}[self.side]
        return ids[:kept] + ids[len(ids) - (self.limit - kept) :]
