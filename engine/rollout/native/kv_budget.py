"""How many sequences a bounded KV cache holds, known before anything is decoded.

The cache is a rectangle: each slot has room for the longest sequence. So the bound is one on slots,
and, where completions share their prompt's keys, on the prompts that are kept at once. Sequences
beyond it wait for a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import RolloutError


class KvRoom(NamedTuple):
    """The sizes of a bounded cache."""

    slots: int  # sequences decoded at once
    columns: int  # longest sequence, prompt included, in tokens
    prompts: int | None = None  # kept at once, apart from completions; None: each slot has its own


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Memory for keys and values; what a forward pass of prompts takes for itself comes on top."""

    memory_mb: int  # e.g. 4096
    token_bytes: int  # of one token's keys and values, all layers, on this rank

    @property
    def tokens(self) -> int:
        """Tokens that fit."""
        return (self.memory_mb << 20) // self.token_bytes

    def check(self, name: str, prompt: int, longest: int) -> None:
        """Raise RolloutError unless one sequence of `longest` tokens fits, `prompt` of a prompt."""
        if longest > self.tokens:
            need = -(-longest * self.token_bytes >> 20)
            raise RolloutError(
                f"{name} has {prompt} tokens, and with its completion {longest}, whose keys and "
                f"values take {need} MiB; rollout.kv_cache_memory_mb={self.memory_mb} holds "
                f"{self.tokens} tokens; raise it, or lower the prompt's or the completion's length"
            )

    def room(
        self, slots: int, n: int, longest_prompt: int, max_new_tokens: int, max_model_len: int
    ) -> KvRoom:
        """At most `slots` sequences, `n` a prompt; one of the longest must fit (`check`)."""
        columns = min(longest_prompt + max_new_tokens, max_model_len)
        alone = KvRoom(min(slots, self.tokens // columns), columns)
        if n == 1:
            return alone
        group = longest_prompt + n * max_new_tokens
        whole, rest = divmod(self.tokens, group)
        part = max(0, (rest - longest_prompt) // max_new_tokens)  # of one more group
        shared = min(slots, whole * n + part)
        if not shared:
            return alone
        left = self.tokens - shared * max_new_tokens
        return KvRoom(shared, columns, min(shared, left // longest_prompt))
