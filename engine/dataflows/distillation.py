"""On-policy distillation: the student samples, a teacher gives the log-prob of each token
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
    """One step: sample, get the teacher's log-probs, move the student towards them.

    The reward is not learned from; it measures the student.
    """
    batch = generate_and_score(roles, prompts, algo)
    batch |= roles.teacher.log_probs(batch)
    batch = add_log_probs(roles, batch, algo)
    batch |= algo.distillation_advantages(batch)
    return StepResult(batch, [roles.actor.update(batch)])
