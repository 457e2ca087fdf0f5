"""The rollout role of asynchronous RL: it decodes without waiting for a batch to finish.

Between two calls its weights may change; unfinished completions continue under the new ones, and
every token carries the version it was sampled under. The controller sends prompts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.batch import Batch
from engine.rollout.partial_groups import Begun
from engine.workers.base import Dispatch, WorkerContext, dispatch
from engine.workers.group_stream import Groups
from engine.workers.rollout import RolloutWorker


@dataclass(frozen=True, slots=True)
class PollResult:
    """What one call of `poll` returns."""

    groups: tuple[Batch, ...]  # finished groups, each `rollout.n` rows
    busy: int  # completions that are decoded or wait for a slot, e.g. 61
    version: int  # of the weights that it decodes with now
    full: bool = False  # a whole group waits for room in the engine
    partial_groups: Mapping[int, Begun] | None = None  # unfinished ones by key, on request


class StreamRolloutWorker(RolloutWorker):
    """A rollout role with its own copy of the policy that decodes continuously."""

    def __init__(self, context: WorkerContext, **options: Any) -> None:
        super().__init__(context, **options)
        self.stream: Groups = self._open_stream()

    @dispatch(Dispatch.RANK_ZERO)
    def load_weights(self, weights: Batch) -> int:
        """Continue under the actor's weights, full or a delta; return their version.

        Raises WeightSyncError as RolloutWorker's does.
        """
        version: int = super().load_weights(weights)
        self.stream.update_weights(version)
        return version

    @dispatch(Dispatch.RANK_ZERO)
    def poll(self, prompts: Batch | None, seconds: float, report: bool = False) -> PollResult:
        """Submit `prompts` (one row a group, its key in `group_ids`) and decode for a while.

        Returns after `seconds`, or as soon as nothing is left to decode; with `report` copies of
        what isn't whole, too.
        """
        self.policy.require_synced()
        if prompts is not None:
            self.stream.submit(prompts)
        done: list[Batch] = []
        deadline = time.monotonic() + seconds
        while self.stream.busy and time.monotonic() < deadline:
            done += self.stream.step()
        partial_groups = self.stream.partial_groups() if report else None
        stream = self.stream
        return PollResult(tuple(done), stream.busy, stream.version, stream.full, partial_groups)

    def close(self) -> None:
        self.stream.close()
        super().close()
