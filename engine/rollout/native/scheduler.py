"""Continuous batching for one rollout: rows enter free slots, decode together and leave when done.

Rows come in the order of the request; a group's prompt is computed once, also where its rows enter
at different times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.rollout.native.decoder import Prefilled
from engine.rollout.native.rows import RowResults
from engine.rollout.native.slots import Decoder, Slots, enough_to_admit, prefill_spans
from engine.rollout.protocol import SamplingParams
from engine.rollout.requests import RolloutStats


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
        self._decoder, self._prompts, self._n = decoder, prompts, params.n
        self._results, self._stats = results, stats
        self._slots = Slots(decoder, results, params, slots, stats)
        self._next_row = 0  # first row not admitted yet
        self._carried: tuple[int, Prefilled] | None = None  # prompt whose rows wait for slots

    def run(self) -> None:
        """Decode until every row is done."""
        while self._results.finished < self._results.total:
            self._admit()
            self._slots.compact()
            if self._slots.busy:
                self._slots.step()

    def _admit(self) -> None:
        """Fill free slots with waiting rows, when enough are free to make a prefill worth it."""
        n, waiting, free = self._n, self._results.total - self._next_row, self._slots.free
        if not waiting or free < enough_to_admit(waiting, self._slots.count, n):
            return
        count = min(waiting, free)
        slots = self._slots.take(count)
        start, self._next_row = self._next_row, self._next_row + count
        for low, high, prefilled in self._prefill(start // n, (self._next_row - 1) // n):
            begin, end = max(start, low * n), min(self._next_row, high * n)
            rows = torch.arange(begin, end, device=slots.device)
            which, taken = rows // n - low, slots[begin - start : end - start]
            self._slots.place(rows, which, taken, prefilled)
            self._slots.draw(prefilled.logits[which], taken)
            unseated = end < high * n
            self._carried = (high - 1, prefilled.last()) if unseated else None

    def _prefill(self, first: int, last: int) -> list[tuple[int, int, Prefilled]]:
        """Return runs (low, high, computed) that cover prompts first..last, each computed once."""
        runs: list[tuple[int, int, Prefilled]] = []
        if self._carried is not None:
            runs.append((first, first + 1, self._carried[1]))
            first += 1
        lengths = [len(prompt) for prompt in self._prompts[first : last + 1]]
        for low, high in prefill_spans(lengths):
            batch = self._prompts[first + low : first + high]
            self._stats.prefill_tokens += sum(map(len, batch))
            runs.append((first + low, first + high, self._decoder.prefill(batch)))
        return runs
