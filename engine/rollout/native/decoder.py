"""What the scheduler needs of a model: prefill, insertion into slots and single-token steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Prefilled:
    """B computed prompts, ready to be inserted into slots."""

    logits: Tensor  # [B, V], after each prompt's last token
    lengths: Tensor  # [B], int64
    state: Tensor  # the decoder's own; keys and values of a `LlamaDecoder`:
    # [layers, 2, B, kv_heads, P, head_dim]
    routed_experts: Tensor | None = None  # [B, P, layers · k] int16, prompts on the right

    def last(self) -> Prefilled:
        """The last prompt of a `LlamaDecoder`'s alone, in storage of its own."""
        kv = self.state[:, :, -1:].clone()
        return Prefilled(self.logits[-1:].clone(), self.lengths[-1:].clone(), kv)


class Decoder(Protocol):
    """A model and the state of the sequences in its slots: `LlamaDecoder`, `GenericDecoder`."""

    slots: int  # sequences decoded at once
    routed_experts: Tensor | None  # [L, layers · k] int16 of the latest `decode`'s tokens

    @property
    def shares_prompts(self) -> bool:
        """Whether completions of a prompt share its keys and values, so that a resumed one is
        inserted by `insert` (its prompt) and `extend` (its own tokens)."""
        ...

    @property
    def static_batches(self) -> bool:
        """Whether sequences are inserted only while no other is running, all of them by one
        prefill."""
        ...

    def free_prompts(self, running: Tensor) -> int:
        """Prompts whose completions may be inserted beside the sequences in the slots `running`
        `[k]`; `slots` where only slots bound them."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """The context that every call but `rebind` must be made in."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled:
        """Run whole prompts."""
        ...

    def insert(self, prefilled: Prefilled, which: Tensor, slots: Tensor, running: Tensor) -> None:
        """Give prompts `which` (ascending) to `slots`, both int64 `[k]`.

        `running` are the slots of the other sequences that are still decoded.
        """
        ...

    def extend(
        self, prefilled: Prefilled, which: Tensor, tokens: Sequence[Sequence[int]], slots: Tensor
    ) -> None:
        """Append k lists of `tokens` to the sequences that `insert` gave a prompt.

        Sequence i follows prompt `which[i]` in slot `slots[i]`, both int64 `[k]`. Called only if
        `shares_prompts`.
        """
        ...

    def keep(self, slot: int, length: int) -> Tensor | None:
        """A copy of what `resume` needs of a slot's first `length` tokens; None if it can't."""
        ...

    def resume(
        self, kept: Sequence[Tensor], tokens: Sequence[Sequence[int]], slots: Tensor
    ) -> Tensor:
        """Give k kept sequences, followed by their lists of `tokens`, to `slots` `[k]`.

        Returns the logits `[k, V]` after the last token of each.
        """
        ...

    def move(self, source: Tensor, target: Tensor, used: int) -> None:
        """Copy slots `source` `[k]` to `target` `[k]`; the first `used` slots stay in use."""
        ...

    def decode(self, tokens: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        """Feed one token to each of the first L slots and return logits `[L, V]`.

        `tokens`, their `positions` in the sequence and `columns` in the completion are int64 `[L]`.
        A finished sequence's slot has position 0; its logits may be anything finite.
        """
        ...

    def sync_samples(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Make the sampled tokens `[R]` the same on all ranks that decode together, in place."""
        ...

    def rebind(self, model: nn.Module) -> bool:
        """Continue with `model`'s weights over the keys and values that are cached.

        False, with nothing changed, if they would not fit.
        """
        ...
