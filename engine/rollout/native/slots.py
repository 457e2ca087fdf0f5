"""Slots: the rows that decode together, each step's work on them, and closing up behind the dead.

All bookkeeping is on tensors with one entry a slot; Python sees a step only as a few counts.
Finished rows ("dead") stay in their slots until new rows take them or enough have gathered to be
worth closing up. Which row comes next is the business of `scheduler.py` and `stream.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.rollout.native.decoder import Prefilled
from engine.rollout.native.rows import RowTable
from engine.rollout.protocol import SamplingParams
from engine.rollout.requests import RolloutStats
from engine.rollout.sampling import sample, uniforms

_PREFILL_TOKENS = 16384  # padded tokens of one forward pass


class Decoder(Protocol):
    """What slots need of a model; see `decoder.LlamaDecoder`."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled: ...
    def place(self, prefilled: Prefilled, which: Tensor, slots: Tensor, seated: Tensor) -> None: ...
    def compact(self, source: Tensor, target: Tensor, live: int) -> None: ...
    def decode(self, tokens: Tensor, positions: Tensor, columns: Tensor) -> Tensor: ...
    def settle(self, token: Tensor, log_prob: Tensor) -> None: ...


def prefill_spans(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut sequences of these lengths into runs (low, high) that are padded and computed at once."""
    first, last = 0, len(lengths) - 1
    while first <= last:
        high, widest = first + 1, lengths[first]
        while high <= last:
            widest = max(widest, lengths[high])
            if widest * (high + 1 - first) > _PREFILL_TOKENS:
                break
            high += 1
        yield first, high
        first = high


class Slots:
    """Up to `count` rows of a `RowTable` in decoding."""

    def __init__(
        self,
        decoder: Decoder,
        table: RowTable,
        params: SamplingParams,
        count: int,
        stats: RolloutStats,
    ) -> None:
        self._decoder, self._table, self._params = decoder, table, params
        self.count, self._stats = count, stats
        self._live = self._dead = 0  # slots in use, and those of them whose row is done
        # One entry a slot; a dead slot's row is the spare one, and its column is 0.
        self._row = torch.full((count,), table.total, device=table.device)
        self._column = torch.zeros_like(self._row)  # of the next token, within its completion
        self._position = torch.zeros_like(self._row)  # of the latest token, within its sequence
        self._token = torch.zeros_like(self._row)  # latest token, not fed to the model yet

    @property
    def free(self) -> int:
        """Slots that rows can take."""
        return self.count - self._live + self._dead

    @property
    def busy(self) -> bool:
        """Whether any row is in decoding."""
        return self._live > self._dead

    def take(self, count: int) -> Tensor:
        """Reserve `count` free slots; `place` must follow for each of them."""
        dead = self._dead_slots()
        fresh = torch.arange(self._live, self.count, device=dead.device)
        self._dead -= min(len(dead), count)
        self._live += max(0, count - len(dead))
        return torch.cat((dead, fresh))[:count]

    def place(self, rows: Tensor, which: Tensor, slots: Tensor, prefilled: Prefilled) -> None:
        """Put new `rows` `[k]` of prompts `which` `[k]` of a prefill in `slots` `[k]`."""
        seated = (self._row < self._table.total).nonzero()[:, 0]
        self._decoder.place(prefilled, which, slots, seated)
        self._row[slots] = rows
        self._column[slots] = 0
        self._position[slots] = self._table.prompt_lengths[rows] - 1

    def go_on(self, slots: Tensor, columns: Tensor, tokens: Tensor) -> None:
        """Let placed rows go on at `columns` `[k]` after their latest `tokens` `[k]`."""
        self._column[slots] = columns
        self._position[slots] += columns
        self._token[slots] = tokens

    def step(self) -> None:
        """Decode one token of every row."""
        live = self._live
        columns = (self._column[:live] - 1).clamp(min=0)  # a dead slot's may be anything
        logits = self._decoder.decode(self._token[:live], self._position[:live], columns)
        self._stats.decode_steps += 1
        self.draw(logits, slice(0, live))

    def draw(self, logits: Tensor, slots: Tensor | slice) -> None:
        """Sample a token for each of `slots`, record it, and retire the rows it ends."""
        table = self._table
        row, column = self._row[slots], self._column[slots]
        noise = uniforms(table.keys[row], column)
        token, log_prob = sample(logits, noise, self._params)
        self._decoder.settle(token, log_prob)
        before = table.finished
        done = table.record(row, column, token, log_prob)
        live = row < table.total
        position = self._position[slots] + live
        column = column + live
        ended = table.finished - before
        if ended:
            self._row[slots] = row.masked_fill(done, table.total)
            column, position = column.masked_fill(done, 0), position.masked_fill(done, 0)
            self._dead += ended
        self._token[slots], self._column[slots], self._position[slots] = token, column, position

    def compact(self) -> None:
        """Close the gaps that dead slots leave, once they are worth the copying."""
        left = self._live - self._dead
        if not self._dead or (left and self._dead < max(4, self._live // 32)):
            return
        dead = self._dead_slots()
        gaps = dead[dead < left]
        tail = (self._row[left : self._live] < self._table.total).nonzero()[:, 0] + left
        self._decoder.compact(tail, gaps, left)
        for state in (self._row, self._column, self._position, self._token):
            state[gaps] = state[tail]
        self._row[left:] = self._table.total
        self._live, self._dead = left, 0

    def _dead_slots(self) -> Tensor:
        return (self._row[: self._live] == self._table.total).nonzero()[:, 0]


def enough_to_admit(waiting: int, slots: int, n: int) -> int:
    """Free slots that make a prefill worth it, with `waiting` rows in groups of `n`."""
    return min(waiting, slots, max(n, slots // 16))
