"""What the scheduler needs of a model (`Decoder`), and a decoder for any causal language model.

`GenericDecoder` uses the model's own forward pass over one left-padded batch: correct for all,
slower than `llama_decoder`. A model that keeps transformers' key/value caches reuses them; one that
takes only `(input_ids, attention_mask)` is run over the whole sequence for each token. It can
record the experts that routers choose, for training to repeat them: rollout routing replay (R3,
arXiv:2510.11370).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from engine.rollout.protocol import TokenLists
from engine.rollout.trainer_model import eval_mode, routers


@dataclass(frozen=True, slots=True)
class Prefilled:
    """B computed prompts, ready to be inserted into slots."""

    logits: Tensor  # [B, V], after each prompt's last token
    lengths: Tensor  # [B], int64
    state: Tensor  # the decoder's own; keys and values of a `LlamaDecoder`:
    # [layers, 2, B, kv_heads, P, head_dim]
    routed_experts: Tensor | None = None  # [B, P, layers · k] int16, prompts on the right

    def last(self) -> Prefilled:
        """Copy the last prompt alone, of a `LlamaDecoder`'s."""
        kv = self.state[:, :, -1:].clone()
        return Prefilled(self.logits[-1:].clone(), self.lengths[-1:].clone(), kv)


class Decoder(Protocol):
    """A model and the state of the sequences in its slots: `LlamaDecoder`, `GenericDecoder`."""

    slots: int  # sequences decoded at once
    routed_experts: Tensor | None  # [L, layers · k] int16 of the latest `decode`'s tokens

    static_batches: bool  # insert sequences only while none is running, all by one prefill

    @property
    def shares_prompts(self) -> bool:
        """Whether completions share their prompt's keys; a resumed one then needs `extend` too."""
        return False

    def free_prompts(self, running: Tensor) -> int:
        """Count the prompts that fit beside those of the slots `running` `[k]`."""

    def session(self) -> AbstractContextManager[None]:
        """Return the context that every call but `rebind` must be made in."""

    def prefill(self, prompts: TokenLists) -> Prefilled:
        """Run whole prompts."""

    def insert(self, prefilled: Prefilled, which: Tensor, slots: Tensor, running: Tensor) -> None:
        """Give prompts `which` (ascending) to `slots`, `[k]`; the slots `running` go on."""

    def extend(
        self, prefilled: Prefilled, which: Tensor, tokens: TokenLists, slots: Tensor
    ) -> None:
        """Append list i of `tokens` to prompt `which[i]` in `slots[i]`, where `shares_prompts`."""
        raise AssertionError("completions share no prompt here")

    def keep(self, slot: int, length: int) -> Tensor | None:
        """Copy what `resume` needs of a slot's first `length` tokens; None if it can't."""
        return None

    def resume(self, prefixes: Sequence[Tensor], tokens: TokenLists, slots: Tensor) -> Tensor:
        """Give what `keep` kept, then `tokens`, to `slots` `[k]`; return logits `[k, V]`."""
        raise AssertionError("nothing was kept")

    def move(self, source: Tensor, target: Tensor, used: int) -> None:
        """Copy slots `source` `[k]` to `target` `[k]`; the first `used` slots stay in use."""

    def decode(self, tokens: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        """Feed one token to each of the first L slots and return logits `[L, V]`.

        `tokens`, their `positions` in the sequence and `columns` in the completion are int64 `[L]`.
        A finished sequence's slot has position 0; its logits may be anything finite.
        """

    def sync_samples(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Make the sampled tokens `[R]` the same on all ranks that decode together, in place."""
        return

    def rebind(self, model: nn.Module) -> bool:
        """Continue with `model`'s weights over what is cached; False where they don't fit."""
        return False


class RoutedExperts:
    """The choices of a model's routers in its latest forward pass."""

    def __init__(self, model: nn.Module) -> None:
        """Find the routers; raise ConfigError for a model without routers that are known here."""
        self._routers = list(routers(model).values())
        self._chosen: dict[nn.Module, Tensor] = {}  # by router, [rows · columns, k]

    @contextmanager
    def recording(self) -> Iterator[None]:
        def record(router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
            self._chosen[router] = output[2]

        handles = [router.register_forward_hook(record) for router in self._routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def latest(self, rows: int) -> Tensor:
        """Return experts of the latest pass over `rows`: int16 `[rows, columns, layers · k]`."""
        layers = [self._chosen[router] for router in self._routers]
        return torch.cat(layers, 1).to(torch.int16).unflatten(0, (rows, -1))


class GenericDecoder(Decoder):
    """A `Decoder` over the model's own forward pass.

    In static batches a prefill's cache is decoded on. Otherwise sequences may enter while others
    run: each slot's tokens are kept, and whenever some enter, all are computed again.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: int,
        columns: int,
        device: torch.device,
        *,
        static_batches: bool,
        routed: RoutedExperts | None = None,
    ) -> None:
        """Serve `slots` sequences of at most `columns` tokens; `routed` is for static batches."""
        self._routed = routed
        self.routed_experts: Tensor | None = None
        self._model, self._device, self.static_batches = model, device, static_batches
        self.slots = slots
        shape = (slots, 0 if static_batches else columns)
        self._ids = torch.zeros(shape, dtype=torch.long, device=device)  # by slot and position
        self._prefilled: _PaddedBatch | None = None  # the latest prefill's, in static batches
        self._batch: _PaddedBatch | None = None  # None: to be computed again from `_ids`
        self._slots = torch.empty(0, dtype=torch.long, device=device)  # of the batch's sequences

    def free_prompts(self, running: Tensor) -> int:
        return self.slots

    @contextmanager
    def session(self) -> Iterator[None]:
        recording = nullcontext() if self._routed is None else self._routed.recording()
        with eval_mode(self._model), recording:
            yield

    def prefill(self, prompts: TokenLists) -> Prefilled:
        """Run whole prompts; `state` is their tokens `[B, P]`."""
        batch = _PaddedBatch(self._model, prompts, self._device)
        logits = batch.prefill()
        if self.static_batches:
            self._prefilled = batch
        lengths = torch.tensor([len(p) for p in prompts], device=self._device)
        routed = None if self._routed is None else self._routed.latest(len(prompts))
        return Prefilled(logits, lengths, padded(prompts).to(self._device), routed)

    def insert(self, prefilled: Prefilled, which: Tensor, slots: Tensor, running: Tensor) -> None:
        if self.static_batches:
            self._batch, self._prefilled, self._slots = self._prefilled, None, slots
            assert self._batch is not None  # the latest prefill's
            self._batch.select(which)
            return
        self._ids[slots, : prefilled.state.shape[1]] = prefilled.state[which]
        self._batch = None

    def move(self, source: Tensor, target: Tensor, used: int) -> None:
        self._ids[target] = self._ids[source]
        if self._batch is None:
            return
        if not used:
            self._batch = None
            return
        moved = torch.isin(self._slots, source)
        stays = (self._slots < used) & ~torch.isin(self._slots, target)
        self._keep((moved | stays).nonzero()[:, 0], self._batch)
        new_slot = torch.arange(len(self._ids), device=self._device)
        new_slot[source] = target
        self._slots = new_slot[self._slots]

    def decode(self, tokens: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        if not self.static_batches:
            self._ids[torch.arange(len(tokens), device=self._device), positions] = tokens
        if self._batch is None:
            self._slots = positions.nonzero()[:, 0]  # a running one's tokens follow its prompt
            ends = (positions + 1).tolist()
            sequences = [self._ids[slot, : ends[slot]].tolist() for slot in self._slots.tolist()]
            self._batch = _PaddedBatch(self._model, sequences, self._device)
            logits = self._batch.prefill()
        else:
            self._keep(positions[self._slots].nonzero()[:, 0], self._batch)
            logits = self._batch.step(tokens[self._slots])
        all_logits = logits.new_zeros(len(tokens), logits.shape[1])
        all_logits[self._slots] = logits
        if self._routed is not None:
            chosen = self._routed.latest(len(self._slots))[:, -1]
            self.routed_experts = chosen.new_zeros(len(tokens), chosen.shape[1])
            self.routed_experts[self._slots] = chosen
        return all_logits

    def _keep(self, index: Tensor, batch: _PaddedBatch) -> None:
        if len(index) < len(self._slots):
            batch.select(index)
            self._slots = self._slots[index]


class _PaddedBatch:
    """Sequences as the model sees them: ids and mask `[R, T]`, and its cache if it has one."""

    def __init__(self, model: nn.Module, sequences: TokenLists, device: torch.device) -> None:
        self._model = model
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._cache = DynamicCache(config=model.config) if "past_key_values" in accepted else None  # type: ignore[arg-type]
        self._options: dict[str, Any] = {}
        if self._cache is not None:
            self._options["past_key_values"] = self._cache
        if "use_cache" in accepted:
            self._options["use_cache"] = self._cache is not None
        self._ids = padded(sequences, "left").to(device)
        self._mask = padded([[1] * len(row) for row in sequences], "left").to(device)

    def prefill(self) -> Tensor:
        """Run the sequences; logits `[R, V]` after the last token."""
        return self._forward(self._ids.shape[1])

    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` `[R]`; logits `[R, V]` after them."""
        self._ids = torch.cat((self._ids, tokens[:, None]), dim=1)
        self._mask = torch.cat((self._mask, torch.ones_like(tokens)[:, None]), dim=1)
        return self._forward(1 if self._cache is not None else self._ids.shape[1])

    def select(self, index: Tensor) -> None:
        """Keep the sequences at `index` `[K]`, repeated where it repeats."""
        self._ids, self._mask = self._ids[index], self._mask[index]
        if self._cache is not None:
            self._cache.batch_select_indices(index)

    def _forward(self, new: int) -> Tensor:
        """Run the last `new` columns and return the logits of the last one."""
        if self._takes_positions:
            self._options["position_ids"] = (self._mask.cumsum(1) - 1).clamp(min=0)[:, -new:]
        ids = self._ids[:, -new:]
        output = self._model(input_ids=ids, attention_mask=self._mask, **self._options)
        return (output.logits if hasattr(output, "logits") else output)[:, -1]


def padded(sequences: TokenLists, side: str = "right") -> Tensor:
    """Return int64 `[B, T]`, padded with 0."""
    rows = [torch.as_tensor(row) for row in sequences]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
