"""Slots: the sequences that are decoded together, and what a step does for them.

All state is in tensors with one entry a slot; Python sees a step only as a few counts. A finished
sequence stays in its slot until another one takes it, or until enough have finished to be worth
closing the gaps. Few numbers of slots are ever computed: oneDNN compiles a kernel for each new
shape of a product, which takes a millisecond. Which sequences come next is `scheduler.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.rollout.native.cpu_sampling import draw
from engine.rollout.native.decoder import Decoder
from engine.rollout.native.sequences import SequenceTable
from engine.rollout.protocol import SamplingParams
from engine.rollout.requests import RolloutStats

OnEnd = Callable[[Tensor, Tensor, Tensor], None]  # rows, slots and fed tokens [k] of what ended


class Slots:
    """Up to `count` sequences of a table in decoding."""

    def __init__(
        self,
        decoder: Decoder,
        table: SequenceTable,
        params: SamplingParams,
        count: int,
        stats: RolloutStats,
        on_end: OnEnd | None = None,
    ) -> None:
        """`on_end` is called while what ended still lies in its slots."""
        self._decoder, self._table, self._params = decoder, table, params
        self._on_end = on_end
        self.count, self._stats = count, stats
        self._used = self._finished = 0  # slots in use, and those of them that have finished
        # One entry a slot; a finished slot's row is the spare one, and its column is 0.
        self._row = torch.full((count,), table.capacity, device=table.device)
        self._column = torch.zeros_like(self._row)  # of the next token, within its completion
        self._position = torch.zeros_like(self._row)  # of the latest token, within its sequence
        self._token = torch.zeros_like(self._row)  # latest token, not fed to the model yet

    @property
    def free(self) -> int:
        """Slots that sequences can take."""
        return self.count - self.running

    @property
    def running(self) -> int:
        """Sequences in decoding."""
        return self._used - self._finished

    def allocate(self, count: int) -> Tensor:
        """Reserve `count` free slots; `assign` must follow for each of them."""
        finished = self._finished_slots()
        unused = torch.arange(self._used, self.count, device=finished.device)
        self._finished -= min(len(finished), count)
        self._used += max(0, count - len(finished))
        return torch.cat((finished, unused))[:count]

    def running_slots(self) -> Tensor:
        """Slots that are assigned to a sequence, ascending."""
        return (self._row < self._table.capacity).nonzero()[:, 0]

    def assign(self, slots: Tensor, rows: Tensor) -> None:
        """Give `slots` `[k]` to the sequences in `rows` `[k]` of the table, without tokens yet."""
        self._row[slots] = rows
        self._column[slots] = 0
        self._position[slots] = self._table.prompt_lengths[rows] - 1

    def resume(self, slots: Tensor, columns: Tensor, tokens: Tensor) -> None:
        """Continue assigned sequences at `columns` `[k]` after their latest `tokens` `[k]`."""
        self._column[slots] = columns
        self._position[slots] += columns
        self._token[slots] = tokens

    def step(self) -> None:
        """Decode one token of every sequence."""
        used = self._used
        columns = (self._column[:used] - 1).clamp(min=0)  # a finished slot's may be anything
        logits = self._decoder.decode(self._token[:used], self._position[:used], columns)
        self._stats.decode_steps += 1
        if (chosen := self._decoder.routed_experts) is not None:
            self._table.record_experts(self._row[:used], self._position[:used], chosen)
        self.sample(logits, slice(0, used))

    def sample(self, logits: Tensor, slots: Tensor | slice) -> None:
        """Sample a token for each of `slots`, record it, and free the slots of those that end."""
        table = self._table
        row, column = self._row[slots], self._column[slots]
        token, log_prob = draw(logits, table.keys[row], column, self._params)
        self._decoder.sync_samples(token, log_prob)
        before = table.finished
        done = table.record(row, column, token, log_prob)
        real = row < table.capacity
        position = self._position[slots] + real
        column = column + real
        ended = table.finished - before
        if ended:
            if self._on_end is not None:
                where = torch.arange(self.count, device=row.device)[slots][done]
                self._on_end(row[done], where, self._position[slots][done] + 1)
            self._row[slots] = row.masked_fill(done, table.capacity)
            column, position = column.masked_fill(done, 0), position.masked_fill(done, 0)
            self._finished += ended
        self._token[slots], self._column[slots], self._position[slots] = token, column, position

    def compact(self) -> None:
        """Close the gaps that finished sequences leave, once they are worth the copying."""
        running = self.running
        left = _slots_for(running)
        if left >= self._used:
            return
        finished = self._finished_slots()
        tail = (self._row[left : self._used] < self._table.capacity).nonzero()[:, 0] + left
        gaps = finished[: len(tail)]
        self._decoder.move(tail, gaps, left)
        for state in (self._row, self._column, self._position, self._token):
            state[gaps] = state[tail]
        self._row[left:] = self._table.capacity
        self._used, self._finished = left, left - running

    def _finished_slots(self) -> Tensor:
        return (self._row[: self._used] == self._table.capacity).nonzero()[:, 0]


def _slots_for(running: int) -> int:
    """Slots that so many sequences are decoded in: one of eight numbers an octave, at least."""
    step = 1 << max(2, running.bit_length() - 4)
    return -(-running // step) * step
