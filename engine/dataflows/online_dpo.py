"""Online DPO: the best and worst of each group are a preference pair (arXiv:2402.04792)."""

from __future__ import annotations

from engine.algorithms.preference import get_pair_loss
from engine.batch import Batch
from engine.config import RLConfig
from engine.controller.futures import LazyBatch
from engine.controller.groups import Roles
from engine.dataflows.algo import Algo, StepResult
from engine.dataflows.best_and_worst import best_and_worst
from engine.dataflows.passes import sampled_and_scored
from engine.dataflows.registry import register_dataflow


def _compares(config: RLConfig) -> bool:
    return get_pair_loss(config.algorithm.preference.loss).needs_reference


@register_dataflow(
    "online_dpo",
    roles={"actor", "rollout", "reward"},
    optional={"reference"},
    uses_advantages=False,
    uses_reference=_compares,
    pairs=True,
)
def online_dpo(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """One step: sample groups, score them, learn to prefer each group's best to its worst."""
    batch = sampled_and_scored(roles, prompts, algo)
    pairs = LazyBatch(best_and_worst(batch, algo))
    if not len(pairs):
        return StepResult(batch)
    if algo.needs.ref_log_probs:
        pairs |= roles.reference.log_probs(pairs)
    return StepResult(batch, [roles.actor.update_pairs(pairs)])
