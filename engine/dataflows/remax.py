"""ReMax: the reward of one greedy completion a prompt is the baseline (arXiv:2310.10505)."""

from __future__ import annotations

from engine.batch import Batch
from engine.controller.roles import Roles
from engine.dataflows.algo import Algo, StepResult
from engine.dataflows.registry import register_dataflow
from engine.dataflows.stages import add_log_probs
from engine.futures import LazyBatch


@register_dataflow(
    "remax",
    roles={"actor", "rollout", "reward"},
    optional={"reference"},
    provides={"baseline_rewards"},
)
def remax(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """One step: sample and decode greedily, score both, learn from the difference."""
    batch = LazyBatch(roles.rollout.generate(prompts))
    greedy = LazyBatch(roles.rollout.generate_greedy(prompts))
    batch |= roles.reward.score(batch)
    greedy |= roles.reward.score(greedy)
    batch = add_log_probs(roles, batch, algo)
    batch |= algo.baseline(batch, greedy)
    batch |= algo.advantages(batch)
    return StepResult(batch, [roles.actor.update(batch)])
