"""On-policy distillation: the student samples, a teacher says how likely each token is
(arXiv:2306.13649 with reverse KL)."""

from __future__ import annotations

from engine.batch import Batch
from engine.controller.roles import Roles
from engine.dataflows.algo import Algo, StepResult
from engine.dataflows.registry import register_dataflow
from engine.dataflows.stages import add_log_probs, generate_and_score


@register_dataflow(
    "distillation", roles={"actor", "rollout", "teacher", "reward"}, uses_advantages=False
)
def distillation(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """One step: sample, ask the teacher, push each token towards what the teacher would say.

    The reward is not learned from; it tells how good the student is.
    """
    batch = generate_and_score(roles, prompts, algo)
    batch |= roles.teacher.log_probs(batch)
    batch = add_log_probs(roles, batch, algo)
    batch |= algo.distillation_advantages(batch)
    return StepResult(batch, [roles.actor.update(batch)])
