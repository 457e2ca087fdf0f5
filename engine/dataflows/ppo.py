"""PPO: advantages from a learned value of each state (arXiv:1707.06347, GAE arXiv:1506.02438)."""

from __future__ import annotations

from engine.batch import Batch
from engine.controller.groups import Roles
from engine.dataflows.algo import Algo, StepResult
from engine.dataflows.passes import policy_passes, sampled_and_scored
from engine.dataflows.registry import register_dataflow


@register_dataflow(
    "ppo",
    roles={"actor", "rollout", "reward", "critic"},
    optional={"reference"},
    provides={"values"},
)
def ppo(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """One step: sample, then reward, critic and reference side by side, then both updates."""
    batch = sampled_and_scored(roles, prompts, algo)
    batch |= roles.critic.values(batch)
    batch = policy_passes(roles, batch, algo)
    batch |= algo.advantages(batch)
    return StepResult(batch, [roles.critic.update(batch), roles.actor.update(batch)])
