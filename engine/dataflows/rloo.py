"""RLOO: REINFORCE with the other completions' mean reward as the baseline (arXiv:2402.14740)."""

from __future__ import annotations

from engine.batch import Batch
from engine.controller.groups import Roles
from engine.dataflows.algo import Algo, StepResult
from engine.dataflows.passes import policy_passes, sampled_and_scored
from engine.dataflows.registry import register_dataflow


@register_dataflow("rloo", roles={"actor", "rollout", "reward"}, optional={"reference"})
def rloo(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """One step: sample, score, and hold each completion against the rest of its group."""
    batch = sampled_and_scored(roles, prompts, algo)
    batch = policy_passes(roles, batch, algo)
    batch |= algo.advantages(batch)
    return StepResult(batch, [roles.actor.update(batch)])
