"""Seating a stream's completions: their prompts are computed, and the tokens they already have.

A completion without tokens is a fresh one: its first token is drawn here, from its prompt's logits.
One with tokens, interrupted before or displaced by an update, goes on after its latest token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.rollout.native.decoder import Prefilled
from engine.rollout.native.slots import Decoder, Slots, prefill_spans
from engine.rollout.native.stream_rows import Request
from engine.rollout.requests import RolloutStats


class StreamDecoder(Decoder, Protocol):
    """What a stream needs of a model beyond a rollout's needs; see `decoder.LlamaDecoder`."""

    @property
    def shares_prompts(self) -> bool: ...
    def adopt(self, model: torch.nn.Module) -> bool: ...
    def place_tails(
        self, prefilled: Prefilled, which: Tensor, tails: Sequence[Sequence[int]], slots: Tensor
    ) -> None: ...


@dataclass(slots=True)
class SeatingPlan:
    """What is computed to seat R completions; lists but `heads` have one entry a completion."""

    heads: list[list[int]] = field(default_factory=list)  # token sequences, each computed once
    which: list[int] = field(default_factory=list)  # its head, ascending
    tails: list[list[int]] = field(default_factory=list)  # what follows the head, already sampled
    done: list[int] = field(default_factory=list)  # tokens it has
    latest: list[int] = field(default_factory=list)  # the last of them, not fed to the model yet


def plan_seating(requests: Sequence[Request], shares_prompts: bool) -> SeatingPlan:
    """Plan for all parts of `requests`, in order.

    Where rows share prompts, a request's prompt is its one head. Otherwise only its fresh parts
    have a head in common; one with tokens brings its whole sequence, all but the latest token.
    """
    plan = SeatingPlan()
    for request in requests:
        own = -1  # the head that is the prompt alone
        for part in request.parts:
            fed = part.token_ids[:-1]
            if fed and not shares_prompts:
                plan.heads.append(request.prompt_ids + fed)
                head, fed, own = len(plan.heads) - 1, [], -1
            else:
                if own < 0:
                    plan.heads.append(request.prompt_ids)
                    own = len(plan.heads) - 1
                head = own
            plan.which.append(head)
            plan.tails.append(fed)
            plan.done.append(len(part.token_ids))
            plan.latest.append(part.token_ids[-1] if part.token_ids else 0)
    return plan


def seat(
    plan: SeatingPlan,
    rows: Sequence[int],
    slots: Slots,
    decoder: StreamDecoder,
    stats: RolloutStats,
) -> None:
    """Put `rows`, one for each completion of `plan`, in free slots; draw the fresh ones' token."""
    taken = slots.take(len(rows))
    device = taken.device
    row = torch.tensor(rows, device=device)
    done, latest = torch.tensor(plan.done, device=device), torch.tensor(plan.latest, device=device)
    for low, high in prefill_spans([len(head) for head in plan.heads]):
        run = slice(bisect_left(plan.which, low), bisect_left(plan.which, high))
        which = torch.tensor(plan.which[run], device=device) - low
        prefilled = decoder.prefill(plan.heads[low:high])
        stats.prefill_tokens += sum(map(len, plan.heads[low:high]))
        slots.place(row[run], which, taken[run], prefilled)
        started = done[run].nonzero()[:, 0]
        if len(started):
            slots.go_on(taken[run][started], done[run][started], latest[run][started])
            _place_tails(prefilled, which, plan.tails[run], taken[run], decoder, stats)
        fresh = (done[run] == 0).nonzero()[:, 0]
        if len(fresh):
            slots.draw(prefilled.logits[which[fresh]], taken[run][fresh])


def _place_tails(
    prefilled: Prefilled,
    which: Tensor,
    tails: Sequence[list[int]],
    slots: Tensor,
    decoder: StreamDecoder,
    stats: RolloutStats,
) -> None:
    """Compute the tails that are not empty, as many at once as a prefill's size allows."""
    index = [i for i, tail in enumerate(tails) if tail]
    width = int(prefilled.lengths.max())
    for low, high in prefill_spans([width + len(tails[i]) for i in index]):
        chosen = torch.tensor(index[low:high], device=slots.device)
        some = [tails[i] for i in index[low:high]]
        decoder.place_tails(prefilled, which[chosen], some, slots[chosen])
        stats.prefill_tokens += sum(map(len, some))
