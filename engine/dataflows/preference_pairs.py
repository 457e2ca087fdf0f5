"""From scored groups to preference pairs."""

from __future__ import annotations

import torch

from engine.batch import Batch
from engine.dataflows.algo import Algo
from engine.futures import LazyBatch


def preference_pairs(lazy: LazyBatch, algo: Algo) -> Batch:
    """Rows 2i and 2i+1: the best and the worst completion of a group, by shaped reward.

    A group whose rewards are all equal gives no pair; of equal completions the first one counts.
    Rows that are empty or whose reward failed are left out.
    """
    batch = lazy.resolve()
    rewards = algo.shaped_rewards(batch, batch["response_mask"]).sum(1)
    usable = batch["response_mask"].bool().any(1)
    if "reward_failed" in batch:
        usable &= ~batch["reward_failed"]
    chosen: list[int] = []
    for group in batch["group_ids"].unique():
        rows = ((batch["group_ids"] == group) & usable).nonzero().squeeze(1)
        if not len(rows):
            continue
        best, worst = rows[rewards[rows].argmax()], rows[rewards[rows].argmin()]
        if rewards[best] > rewards[worst]:
            chosen += [int(best), int(worst)]
    groups = len(batch["group_ids"].unique())
    algo.metrics["preference/pairs"] = len(chosen) / 2
    algo.metrics["preference/groups_with_pair"] = len(chosen) / 2 / groups
    return batch.rows(torch.tensor(chosen, dtype=torch.long))
