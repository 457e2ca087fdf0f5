"""PPO: advantages from a learned value of each state (arXiv:1707.06347, GAE arXiv:1506.02438)."""

from __future__ import annotations

from engine.batch import Batch
from engine.controller.roles import Roles
from engine.dataflows.algo import Algo, StepResult
from engine.dataflows.registry import register_dataflow
from engine.dataflows.stages import add_log_probs, generate_and_score


@register_dataflow(
    "ppo",
    roles={"actor", "rollout", "reward", "critic"},
    optional={"reference"},
    provides={"values"},
)
def ppo(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """One step: sample, then reward, critic and reference concurrently, then both updates."""
    batch = generate_and_score(roles, prompts, algo)
    batch |= roles.critic.values(batch)
    batch = add_log_probs(roles, batch, algo)
    batch |= algo.advantages(batch)
    critic = roles.critic.update(batch)
    policy = roles.actor.update(batch) if algo.policy_learns else roles.actor.skip_update()
    return StepResult(batch, [critic, policy])
