"""GRPO and its family: advantages from a group's rewards, no critic (arXiv:2402.03300)."""

from __future__ import annotations

from engine.batch import Batch
from engine.controller.roles import Roles
from engine.dataflows.algo import Algo, StepResult
from engine.dataflows.registry import register_dataflow
from engine.dataflows.stages import add_log_probs, generate_and_score


@register_dataflow("grpo", roles={"actor", "rollout", "reward"}, optional={"reference"})
def grpo(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """One step: sample groups, score them, learn from the differences within each group."""
    batch = generate_and_score(roles, prompts, algo)
    batch = add_log_probs(roles, batch, algo)
    batch |= algo.advantages(batch)
    return StepResult(batch, [roles.actor.update(batch)])
