"""Keys and values of sequences that ended, for requests that go on from them (a next turn)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """A sequence that ended, but for its last token, which was never fed."""

    ids: list[int]  # T tokens
    kv: Tensor  # [layers, 2, kv_heads, T, head_dim], a copy: its slot is free for others


class KeptPrefixes:
    """Prefixes by the key of their request, at most `most_tokens` tokens of them.

    The oldest are dropped first: their next turn computes its whole prompt.
    """

    def __init__(self, most_tokens: int) -> None:
        self.tokens = 0
        self._most = most_tokens
        self._kept: dict[Hashable, KeptPrefix] = {}  # the oldest first

    def add(self, key: Hashable, prefix: KeptPrefix) -> None:
        """Keep the sequence that the request `key` ended with."""
        self.drop(key)
        self._kept[key] = prefix
        self.tokens += len(prefix.ids)
        while self.tokens > self._most:
            self.drop(next(iter(self._kept)))

    def take(self, key: Hashable, prompt_ids: Sequence[int]) -> KeptPrefix | None:
        """The prefix of a request, which is kept no longer; None if `prompt_ids` differ from it."""
        prefix = self._kept.get(key)
        self.drop(key)
        if prefix is None or len(prompt_ids) <= len(prefix.ids):
            return None
        return prefix if list(prompt_ids[: len(prefix.ids)]) == prefix.ids else None

    def drop(self, key: Hashable) -> None:
        """Forget a request's sequence, if it is kept."""
        prefix = self._kept.pop(key, None)
        self.tokens -= 0 if prefix is None else len(prefix.ids)

    def clear(self) -> None:
        """Forget all: the weights that made them are gone."""
        self._kept.clear()
        self.tokens = 0
