"""Online DPO: the best and worst of each group are a preference pair (arXiv:2402.04792)."""

from __future__ import annotations

from engine.algorithms.preference import get_pair_loss
from engine.batch import Batch
from engine.config import RLConfig
from engine.controller.roles import Roles
from engine.dataflows.algo import Algo, StepResult
from engine.dataflows.preference_pairs import preference_pairs
from engine.dataflows.registry import register_dataflow
from engine.dataflows.stages import generate_and_score
from engine.futures import LazyBatch


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
    batch = generate_and_score(roles, prompts, algo)
    pairs = LazyBatch(preference_pairs(batch, algo))
    if not len(pairs):
        return StepResult(batch)
    if algo.needs.ref_log_probs:
        pairs |= roles.reference.log_probs(pairs)
    return StepResult(batch, [roles.actor.update_pairs(pairs)])
