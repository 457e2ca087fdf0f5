"""Rollout sources: who waits for whom between rollout and update, one file a `trainer.mode`.

- sync: rollout, then update, on the same weights. Nothing is stale.
- one_step_off: step k+1 is sampled during the update of step k, so it is one version behind.
- async: rollout workers never stop; a step takes what is fresh enough (AReaL, arXiv:2505.24298;
  in-flight weight updates as in PipelineRL, arXiv:2509.19128).

The training loop and the dataflows are the same for all of them.
"""

from engine.trainers.rollout_sources.source import (
    RolloutSource,
    SourceInputs,
    get_rollout_source,
    register_rollout_source,
    sampler_count,
)

__all__ = [
    "RolloutSource",
    "SourceInputs",
    "get_rollout_source",
    "register_rollout_source",
    "sampler_count",
]
