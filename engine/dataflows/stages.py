"""Stages that several algorithms share; a pass that nothing reads is left out."""

from __future__ import annotations

from engine.batch import Batch
from engine.controller.roles import Roles
from engine.dataflows.algo import Algo
from engine.futures import ConcatFuture, LazyBatch


def generate_and_score(roles: Roles, prompts: Batch, algo: Algo) -> LazyBatch:
    """Sample and score; with `rollout.parts`, finished parts are scored while others decode."""
    count = min(algo.config.rollout.parts, len(prompts))
    if count == 1:
        batch = LazyBatch(roles.rollout.generate(prompts))
        return algo.sampled(batch | roles.reward.score(batch))
    roles.rollout.begin(prompts)
    parts = [roles.rollout.next_part(left) for left in range(count, 0, -1)]
    scores = [roles.reward.score_part(part) for part in parts]
    return algo.sampled(LazyBatch(ConcatFuture(parts), ConcatFuture(scores)))


def add_log_probs(roles: Roles, batch: LazyBatch, algo: Algo) -> LazyBatch:
    """Add what the loss and the reward compare with: the reference's and the old log-probs."""
    if algo.needs.ref_log_probs:
        batch |= roles.reference.log_probs(batch)
    if algo.needs.ref_kl:
        batch |= roles.reference.full_kl(batch)
    if algo.needs.old_log_probs:
        batch |= roles.actor.log_probs(batch)
    return batch
