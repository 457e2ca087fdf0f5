"""RLOO: REINFORCE with the other completions' mean reward as the baseline (arXiv:2402.14740)."""

from __future__ import annotations

from engine.batch import Batch
from engine.controller.roles import Roles
from engine.dataflows.algo import Algo, StepResult
from engine.dataflows.registry import register_dataflow
from engine.dataflows.stages import add_log_probs, generate_and_score


@register_dataflow("rloo", roles={"actor", "rollout", "reward"}, optional={"reference"})
def rloo(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """One step: sample, score, and compare each completion with the rest of its group."""
    batch = generate_and_score(roles, prompts, algo)
    batch = add_log_probs(roles, batch, algo)
    batch |= algo.advantages(batch)
    return StepResult(batch, [roles.actor.update(batch)])
