"""DAPO's dynamic sampling: keep groups with a signal, and refill up to a limit.

What lives here: which groups to keep and the decision to continue, as pure functions.
What does not: generating the refill (a dataflow does that).
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from engine.algorithms.masked import Groups
from engine.errors import ConfigError


class Refill(Enum):
    """What to do after a generation batch was filtered."""

    ENOUGH = "the batch is full"
    MORE = "generate another batch"
    GIVE_UP = "the bound is reached; train with what there is, or stop if that is nothing"


def groups_with_signal(
    metric: Tensor, group_ids: Tensor, rows: Tensor | None = None, *, tolerance: float = 0.0
) -> Tensor:
    """Rows `[B]` (bool) whose group's range (max − min of `metric [B]`) is above `tolerance`.

    `rows [B]` (bool) leaves rows out, e.g. failed rewards: they are never kept and don't count.
    A group of one has range 0. Source: DAPO, arXiv 2503.14476, eq. 11.
    """
    groups = Groups.of(group_ids, rows)
    return (groups.range(metric) > tolerance)[groups.index] & groups.rows


def first_groups(group_ids: Tensor, keep: Tensor, wanted: int) -> Tensor:
    """Indices (int64) of kept rows of the first `wanted` groups, in order of appearance.

    Rows keep their order. Fewer groups than wanted give all there are.
    """
    chosen: dict[int, None] = {}
    for group in group_ids[keep.bool()].tolist():
        chosen.setdefault(int(group))
    ids = torch.tensor(list(chosen)[:wanted], dtype=group_ids.dtype, device=group_ids.device)
    return (torch.isin(group_ids, ids) & keep.bool()).nonzero().squeeze(1)


def refill_decision(
    kept_groups: int, wanted_groups: int, generated_batches: int, max_num_gen_batches: int
) -> Refill:
    """Whether to generate another batch; raise ConfigError for a bound below 1."""
    if max_num_gen_batches < 1:
        raise ConfigError(
            f"filter_groups.max_num_gen_batches={max_num_gen_batches} must be 1 or more: without "
            "a bound, prompts that are all solved or all failed would be drawn for ever"
        )
    if kept_groups >= wanted_groups:
        return Refill.ENOUGH
    return Refill.MORE if generated_batches < max_num_gen_batches else Refill.GIVE_UP
