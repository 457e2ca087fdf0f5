"""Dynamic sampling within a step: collects groups with signal, and samples more as needed.

`Algo.rows_with_signal` finds the groups, `algorithms.dynamic_sampling` decides when to stop.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.algorithms.dynamic_sampling import Refill, first_groups, refill_decision
from engine.batch import Batch
from engine.dataflows.algo import Algo
from engine.futures import LazyBatch


class DynamicSampling:
    """Collects groups with signal over several rollouts of one step, `wanted` of them at most.

    If `max_num_gen_batches` rollouts have no group with signal, the last one is used whole: its
    advantages are zero, so only a KL term changes the policy (metric `sampling/groups_kept` is 0).
    """

    def __init__(self, algo: Algo, wanted: int) -> None:
        self._algo, self._wanted = algo, wanted
        self._settings = algo.config.algorithm.filter_groups
        self._kept: list[Batch] = []
        self._last: Batch | None = None
        self._rollouts = self._groups = self._sampled = 0

    def rounds(self, prompts: Batch) -> Iterator[Batch]:
        """Prompts to sample next, first `prompts`; call `add` for each.

        There is one round without a source of more prompts (asynchronous rollout, which filters
        groups itself).
        """
        yield prompts
        while self._algo.more_prompts is not None and self._decision() is Refill.MORE:
            yield self._algo.more_prompts()

    def add(self, lazy: LazyBatch) -> None:
        """Keep the groups with signal of one rollout; waits for its scores."""
        batch = lazy.resolve()
        # Each rollout numbers its groups from 0; here the numbers must be unique.
        batch = batch | {"group_ids": batch["group_ids"] + self._sampled}
        self._sampled += len(batch["group_ids"].unique())
        keep = self._algo.rows_with_signal(batch)
        self._rollouts += 1
        self._last = batch
        self._groups += len(batch["group_ids"][keep].unique())
        if bool(keep.any()):
            self._kept.append(batch.rows(keep))

    def batch(self) -> Batch:
        """The first `wanted` groups with signal, or the last rollout where there are none."""
        assert self._last is not None, "a step samples at least once"
        metrics = self._algo.metrics
        metrics["sampling/rollouts"] = float(self._rollouts)
        metrics["sampling/groups_sampled"] = float(self._sampled)
        metrics["sampling/groups_kept"] = float(min(self._groups, self._wanted))
        if not self._kept:
            return self._last
        whole = Batch.concat(self._kept)
        every = torch.ones(len(whole), dtype=torch.bool)
        return whole.rows(first_groups(whole["group_ids"], every, self._wanted))

    def _decision(self) -> Refill:
        return refill_decision(
            self._groups, self._wanted, self._rollouts, self._settings.max_num_gen_batches
        )
