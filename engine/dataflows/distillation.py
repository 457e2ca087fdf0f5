"""On-policy distillation: the student samples, teachers say what they think of each token
(arXiv:2306.13649)."""

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
    """One step: sample, ask the teachers, move the student towards them.

    The reward is not learned from; it measures the student.
    """
    algo.teacher_weights(prompts)  # a row without a teacher is refused before anything is sampled
    batch = generate_and_score(roles, prompts, algo)
    batch |= algo.teacher_weights(batch.resolve())
    settings = algo.config.algorithm.distillation
    if settings.loss == "policy_gradient":
        batch |= roles.teacher.log_probs(batch)
        batch = add_log_probs(roles, batch, algo)
        batch |= algo.distillation_advantages(batch)
        return StepResult(batch, [roles.actor.update(batch)])
    if settings.top_k:
        batch |= roles.teacher.top_k(batch)
    return StepResult(batch, [roles.actor.update_distilled(batch)])
