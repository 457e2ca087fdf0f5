"""Any causal LM behind the `Decoder` of `slots.py`, for streams: correct for all, not fast.

It keeps each slot's tokens and runs them by `generic.Sequences`. Rows that go on and rows that end
reuse the model's cache; whenever rows enter, all rows are computed anew, as one left-padded batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.rollout.inference_mode import evaluating
from engine.rollout.native.decoder import Prefilled
from engine.rollout.native.generic import Sequences


class GenericDecoder:
    """Prefill and single-token steps by the model's own forward pass."""

    shares_prompts = False  # a row's tokens are placed whole

    def __init__(self, model: nn.Module, slots: int, columns: int, device: torch.device) -> None:
        """Serve `slots` rows of at most `columns` tokens, prompts included."""
        self._model, self._device = model, device
        self._ids = torch.zeros(slots, columns, dtype=torch.long, device=device)  # by position
        self._sequences: Sequences | None = None  # None: to be computed anew
        self._order = torch.empty(0, dtype=torch.long, device=device)  # slot of each sequence

    def adopt(self, model: Any) -> bool:
        """False: the model's cache can't be kept apart from it."""
        return False

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled:
        """Run whole prompts; `kv` holds nothing but their tokens `[B, P]`, padded on the right."""
        with evaluating(self._model):
            logits = Sequences(self._model, prompts, self._device).prefill()
        lengths = torch.tensor([len(p) for p in prompts], device=self._device)
        ids = torch.nn.utils.rnn.pad_sequence([torch.as_tensor(p) for p in prompts], True)
        return Prefilled(logits, lengths, ids.to(self._device))

    def place(self, prefilled: Prefilled, which: Tensor, slots: Tensor, seated: Tensor) -> None:
        """Give the tokens of prompts `which` `[k]` to `slots` `[k]`."""
        self._ids[slots, : prefilled.kv.shape[1]] = prefilled.kv[which]
        self._sequences = None

    def place_tails(
        self, prefilled: Prefilled, which: Tensor, tails: Sequence[Sequence[int]], slots: Tensor
    ) -> None:
        """Never needed, for `place` gets whole rows."""
        raise AssertionError("GenericDecoder shares no prompts")

    def compact(self, source: Tensor, target: Tensor, live: int) -> None:
        """Copy slots `source` `[k]` to `target` `[k]`; the first `live` slots stay in use."""
        self._ids[target] = self._ids[source]
        if self._sequences is None:
            return
        if not live:
            self._sequences = None
            return
        moved = torch.isin(self._order, source)
        stays = (self._order < live) & ~torch.isin(self._order, target)
        self._select((moved | stays).nonzero()[:, 0])
        new_slot = torch.arange(len(self._ids), device=self._device)
        new_slot[source] = target
        self._order = new_slot[self._order]

    def decode(self, tokens: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        """Feed one token to each of the first L slots and return logits `[L, V]`.

        `tokens` and their `positions` in the sequence are int64 `[L]`. A token at position 0 is
        that of a dead slot, for a live one follows its prompt; its logits are 0.
        """
        self._ids[torch.arange(len(tokens), device=self._device), positions] = tokens
        with evaluating(self._model):
            if self._sequences is None:
                self._order = positions.nonzero()[:, 0]
                rows, ends = self._order.tolist(), (positions + 1).tolist()
                whole = [self._ids[row, : ends[row]].tolist() for row in rows]
                self._sequences = Sequences(self._model, whole, self._device)
                logits = self._sequences.prefill()
            else:
                self._select(positions[self._order].nonzero()[:, 0])
                logits = self._sequences.step(tokens[self._order])
        every = logits.new_zeros(len(tokens), logits.shape[1])
        every[self._order] = logits
        return every

    def settle(self, token: Tensor, log_prob: Tensor) -> None:
        """Nothing: no other rank decodes the same rows."""

    def _select(self, index: Tensor) -> None:
        """Keep the sequences at `index`, ascending."""
        assert self._sequences is not None
        if len(index) < len(self._order):
            self._sequences.select(index)
            self._order = self._order[index]
