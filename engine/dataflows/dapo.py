"""DAPO: groups whose completions all score the same are replaced by more samples
(arXiv:2503.14476, section 3.2)."""

from __future__ import annotations

from engine.batch import Batch
from engine.controller.roles import Roles
from engine.dataflows.algo import Algo, StepResult
from engine.dataflows.dynamic_sampling import DynamicSampling
from engine.dataflows.registry import register_dataflow
from engine.dataflows.stages import add_log_probs, generate_and_score
from engine.futures import LazyBatch


@register_dataflow(
    "dapo", roles={"actor", "rollout", "reward"}, optional={"reference"}, refills=True
)
def dapo(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """One step: sample until enough groups have signal, then learn as GRPO does."""
    sampling = DynamicSampling(algo, wanted=len(prompts))
    for requested in sampling.rounds(prompts):
        sampling.add(generate_and_score(roles, requested, algo))
    batch = add_log_probs(roles, LazyBatch(sampling.batch()), algo)
    batch |= algo.advantages(batch)
    return StepResult(batch, [roles.actor.update(batch)])
