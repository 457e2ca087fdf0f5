"""Which completions of a stream vLLM is given: those that its KV cache has room for.

vLLM takes a request when there is room for its prompt, and where running ones then outgrow the
cache it preempts some and computes them again. Here a completion waits until its keys and values
will fit beside those of the running ones. Nobody knows how long these get; each is taken for
`expected` tokens long, the mean of a stream that hasn't ended: tokens sampled / completions ended,
the estimate of an exponential lifetime under censoring. Of N completions that begin together the
share that is still running after t tokens is at most mean / t (Markov's inequality), so together
they hold N · mean tokens at most, and the rest is vLLM's preemption.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Row(NamedTuple):
    """A completion that vLLM has, or may be given."""

    key: Hashable  # of its prompt
    prompt: int  # tokens, e.g. 900
    limit: int  # longest completion, in tokens, e.g. 1024
    tokens: int = 0  # sampled so far


@dataclass(slots=True)
class KvAdmission:
    """The room of one KV cache."""

    capacity: int  # tokens that the cache holds, e.g. 65536
    block: int  # tokens of a block, e.g. 32
    shares_prompts: bool  # completions of a prompt share its whole blocks
    ended: int = 0  # completions
    sampled: int = 0  # their tokens

    def end(self, tokens: int) -> None:
        """A completion has ended after so many tokens."""
        self.ended += 1
        self.sampled += tokens

    def count(self, running: Iterable[Row], waiting: Iterable[Row]) -> int:
        """How many of `waiting`, from the first on, vLLM may be given beside `running`."""
        rows = list(running)
        expected = self._expected(rows)
        prompts: set[Hashable] = set()
        held = sum(self._need(row, expected, prompts) for row in rows)
        found = 0
        for row in waiting:
            held += self._need(row, expected, prompts)
            if held > self.capacity and (rows or found):  # one alone always fits
                break
            found += 1
        return found

    def _expected(self, running: list[Row]) -> float:
        """Mean length of a completion, in tokens; infinite before one has ended."""
        if not self.ended:
            return float("inf")
        return (self.sampled + sum(row.tokens for row in running)) / self.ended

    def _need(self, row: Row, expected: float, prompts: set[Hashable]) -> int:
        """Tokens of cache for a completion, and for its prompt unless that is in `prompts`."""
        shared = row.prompt // self.block * self.block if self.shares_prompts else 0
        longest = min(row.limit, max(expected, row.tokens + self.block))
        own = row.prompt - shared + int(longest)
        need = -(-own // self.block) * self.block
        if row.key not in prompts:
            prompts.add(row.key)
            need += shared
        return need
