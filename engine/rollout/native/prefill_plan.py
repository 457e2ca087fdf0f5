"""What is computed to admit completions: whole prompts, each once, in runs of one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.rollout.native.sequences import Request
from engine.rollout.stream import PartialCompletion

_PREFILL_TOKENS = 16384  # padded tokens of one forward pass

Admitted = list[tuple[Request, list[PartialCompletion]]]  # completions of each request


@dataclass(slots=True)
class PrefillPlan:
    """What is computed to admit R completions; lists but `prompts` have one entry a completion."""

    prompts: list[list[int]] = field(default_factory=list)  # token sequences, each computed once
    which: list[int] = field(default_factory=list)  # its prompt, ascending
    tails: list[list[int]] = field(default_factory=list)  # what follows the prompt, sampled before
    sampled: list[int] = field(default_factory=list)  # number of tokens it has
    latest: list[int] = field(default_factory=list)  # the last of them, not fed to the model yet


def plan_prefill(admitted: Admitted, shares_prompts: bool) -> PrefillPlan:
    """Plan the prefill of `admitted`, in order.

    Where completions share prompts, a request's prompt is computed once. Otherwise only those
    without tokens share it, those of equal requests that follow each other too; a resumed one is
    computed as a whole, all but the latest token.
    """
    plan = PrefillPlan()
    for request, parts in admitted:
        shared = -1  # the entry that is the prompt alone
        if not shares_prompts and plan.prompts and plan.prompts[-1] == request.prompt_ids:
            shared = len(plan.prompts) - 1
        for part in parts:
            tail = part.token_ids[:-1]
            if tail and not shares_prompts:
                plan.prompts.append(request.prompt_ids + tail)
                entry, tail, shared = len(plan.prompts) - 1, [], -1
            else:
                if shared < 0:
                    plan.prompts.append(request.prompt_ids)
                    shared = len(plan.prompts) - 1
                entry = shared
            plan.which.append(entry)
            plan.tails.append(tail)
            plan.sampled.append(len(part.token_ids))
            plan.latest.append(part.token_ids[-1] if part.token_ids else 0)
    return plan


def prefill_spans(sequences: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Cut `sequences` into runs (low, high) that are padded and computed in one forward pass."""
    first, count = 0, len(sequences)
    while first < count:
        high, widest = first + 1, len(sequences[first])
        while high < count:
            widest = max(widest, len(sequences[high]))
            if widest * (high + 1 - first) > _PREFILL_TOKENS:
                break
            high += 1
        yield first, high
        first = high
