"""Passes over a sampled batch that depend on the settings: none is made that nothing reads."""

from __future__ import annotations

from engine.controller.futures import LazyBatch
from engine.controller.groups import Roles
from engine.dataflows.algo import Algo


def policy_passes(roles: Roles, batch: LazyBatch, algo: Algo) -> LazyBatch:
    """Add what the loss and the reward compare with: the reference's and the old log-probs."""
    if algo.needs.ref_log_probs:
        batch |= roles.reference.log_probs(batch)
    if algo.needs.ref_kl:
        batch |= roles.reference.full_kl(batch)
    if algo.needs.old_log_probs:
        batch |= roles.actor.log_probs(batch)
    return batch
