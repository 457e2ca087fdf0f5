"""Continuous batching for one rollout: rows enter free slots, decode together and leave when done.

All bookkeeping is on tensors with one entry a slot; Python sees a step only as a few counts.
Finished rows ("dead") stay in their slots until new rows take them or enough have gathered to be
worth closing up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.rollout.native.decoder import Prefilled
from engine.rollout.native.rows import RowResults
from engine.rollout.protocol import SamplingParams
from engine.rollout.requests import RolloutStats
from engine.rollout.sampling import sample, uniforms

_PREFILL_TOKENS = 16384  # padded prompt tokens of one forward pass


class Decoder(Protocol):
    """What the scheduler needs of a model; see `decoder.LlamaDecoder`."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled: ...
    def place(self, prefilled: Prefilled, which: Tensor, slots: Tensor, seated: Tensor) -> None: ...
    def compact(self, source: Tensor, target: Tensor, live: int) -> None: ...
    def decode(self, tokens: Tensor, positions: Tensor, columns: Tensor) -> Tensor: ...


class Scheduler:
    """Decodes all completions of one request; use once."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        slots: int,
        results: RowResults,
        stats: RolloutStats,
    ) -> None:
        self._decoder, self._prompts, self._params = decoder, prompts, params
        self._slots, self._results, self._stats = slots, results, stats
        self._next_row = 0  # first row not admitted yet
        self._carried: tuple[int, Prefilled] | None = None  # prompt whose rows wait for slots
        self._live = self._dead = 0
        # One entry a slot; a dead slot's row is the spare one, and its column is 0.
        self._row = torch.full((slots,), results.total, device=results.device)
        self._column = torch.zeros_like(self._row)  # of the next token, within its completion
        self._position = torch.zeros_like(self._row)  # of the latest token, within its sequence
        self._token = torch.zeros_like(self._row)  # latest token, not fed to the model yet

    def run(self) -> None:
        """Decode until every row is done."""
        while self._results.finished < self._results.total:
            self._admit()
            self._compact()
            if self._live > self._dead:
                self._step()

    def _admit(self) -> None:
        """Fill free slots with waiting rows, when enough are free to make a prefill worth it."""
        n, waiting = self._params.n, self._results.total - self._next_row
        free = self._slots - self._live + self._dead
        enough = min(waiting, self._slots, max(n, self._slots // 16))
        if not waiting or free < enough:
            return
        count = min(waiting, free)
        dead = self._dead_slots()
        fresh = torch.arange(self._live, self._slots, device=dead.device)
        slots = torch.cat((dead, fresh))[:count]
        self._dead -= min(len(dead), count)
        self._live += max(0, count - len(dead))
        start, self._next_row = self._next_row, self._next_row + count
        for low, high, prefilled in self._prefill(start // n, (self._next_row - 1) // n):
            begin, end = max(start, low * n), min(self._next_row, high * n)
            rows = torch.arange(begin, end, device=slots.device)
            self._seat(rows, rows // n - low, slots[begin - start : end - start], prefilled)
            unseated = end < high * n
            self._carried = (high - 1, prefilled.last()) if unseated else None

    def _prefill(self, first: int, last: int) -> list[tuple[int, int, Prefilled]]:
        """Return runs (low, high, computed) that cover prompts first..last, each computed once."""
        runs: list[tuple[int, int, Prefilled]] = []
        if self._carried is not None:
            runs.append((first, first + 1, self._carried[1]))
            first += 1
        while first <= last:
            high, widest = first + 1, len(self._prompts[first])
            while high <= last:
                widest = max(widest, len(self._prompts[high]))
                if widest * (high + 1 - first) > _PREFILL_TOKENS:
                    break
                high += 1
            batch = self._prompts[first:high]
            self._stats.prefill_tokens += sum(map(len, batch))
            runs.append((first, high, self._decoder.prefill(batch)))
            first = high
        return runs

    def _seat(self, rows: Tensor, which: Tensor, slots: Tensor, prefilled: Prefilled) -> None:
        """Put `rows` `[k]` of prompts `which` `[k]` of a prefill in `slots` and draw a token."""
        seated = (self._row < self._results.total).nonzero()[:, 0]
        self._decoder.place(prefilled, which, slots, seated)
        self._row[slots] = rows
        self._column[slots] = 0
        self._position[slots] = self._results.prompt_lengths[rows] - 1
        self._draw(prefilled.logits[which], slots)

    def _step(self) -> None:
        live = self._live
        columns = (self._column[:live] - 1).clamp(min=0)  # a dead slot's may be anything
        logits = self._decoder.decode(self._token[:live], self._position[:live], columns)
        self._stats.decode_steps += 1
        self._draw(logits, slice(0, live))

    def _draw(self, logits: Tensor, slots: Tensor | slice) -> None:
        """Sample a token for each of `slots`, record it, and retire the rows it ends."""
        row, column = self._row[slots], self._column[slots]
        noise = uniforms(self._results.keys[row], column)
        token, log_prob = sample(logits, noise, self._params)
        before = self._results.finished
        done = self._results.record(row, column, token, log_prob)
        live = row < self._results.total
        position = self._position[slots] + live
        column = column + live
        ended = self._results.finished - before
        if ended:
            self._row[slots] = row.masked_fill(done, self._results.total)
            column, position = column.masked_fill(done, 0), position.masked_fill(done, 0)
            self._dead += ended
        self._token[slots], self._column[slots], self._position[slots] = token, column, position

    def _compact(self) -> None:
        """Close the gaps that dead slots leave, once they are worth the copying."""
        left = self._live - self._dead
        if not self._dead or (left and self._dead < max(4, self._live // 32)):
            return
        dead = self._dead_slots()
        gaps = dead[dead < left]
        tail = (self._row[left : self._live] < self._results.total).nonzero()[:, 0] + left
        self._decoder.compact(tail, gaps, left)
        for state in (self._row, self._column, self._position, self._token):
            state[gaps] = state[tail]
        self._row[left:] = self._results.total
        self._live, self._dead = left, 0

    def _dead_slots(self) -> Tensor:
        return (self._row[: self._live] == self._results.total).nonzero()[:, 0]
