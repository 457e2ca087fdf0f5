"""trainer.mode=sync: rollout and update take turns on the same weights."""

from __future__ import annotations

from engine.batch import Batch
from engine.trainers.rollout_sources.source import RolloutSource, register_rollout_source


@register_rollout_source("sync")
class SyncSource(RolloutSource):
    """Gives prompts only; the dataflow samples them with the trainer's own weights."""

    def next_prompts(self) -> Batch:
        return self.prompts.next_batch()
