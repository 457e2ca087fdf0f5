"""What an RL run is made of before it starts: its roles and their placement."""

from __future__ import annotations

import math
import os

from engine.config import ActorConfig, CriticConfig, RLConfig
from engine.controller.host import RoleSpec
from engine.controller.launch import Placement, Pool
from engine.dataflows.needs import Needs

# Roles that share the policy's process, in the order in which they are built.
_COLOCATED = ("actor", "rollout", "reference", "critic")


def place(config: RLConfig, roles: frozenset[str]) -> Placement:
    """The policy's roles in one process with all cores, the reward beside it in another."""
    cores = float(config.trainer.threads or os.cpu_count() or 1)
    policy = tuple(role for role in _COLOCATED if role in roles)
    return Placement(
        pools=(Pool(policy, cpus=cores), Pool(("reward",), cpus=0.0)),
        kind=config.trainer.placement,
        start_timeout_s=config.trainer.start_timeout_s,
        call_timeout_s=config.trainer.step_timeout_s,
    )


def role_specs(
    model_path: str,
    config: RLConfig,
    roles: frozenset[str],
    needs: Needs,
    *,
    max_response_length: int,
    max_model_len: int,
    seed: int,
    dtype: str,
) -> list[RoleSpec]:
    """How to build each role that the dataflow calls."""
    from engine.workers.actor import ActorWorker
    from engine.workers.critic import CriticWorker
    from engine.workers.reference import ReferenceWorker
    from engine.workers.reward import RewardWorker
    from engine.workers.rollout import RolloutWorker

    steps = config.trainer.total_training_steps
    temperature = config.rollout.temperature
    rows = config.trainer.train_batch_size * config.rollout.n
    common = {"model_path": model_path, "dtype": dtype}
    specs = [
        RoleSpec(
            "actor",
            ActorWorker,
            common
            | {
                "config": config.actor,
                "temperature": temperature,
                "total_steps": steps * _steps_an_update(config.actor, rows),
                "seed": seed,
                "preference": config.algorithm.preference,
                "sum_pi_squared": needs.sum_pi_squared,
                "plugins": config.plugins,
            },
        ),
        RoleSpec(
            "rollout",
            RolloutWorker,
            {
                "model_path": model_path,
                "config": config.rollout,
                "max_response_length": max_response_length,
                "max_model_len": max_model_len,
                "seed": seed,
            },
        ),
        RoleSpec(
            "reference",
            ReferenceWorker,
            common
            | {
                "temperature": temperature,
                "max_tokens_per_micro_batch": config.actor.max_tokens_per_micro_batch,
            },
        ),
        RoleSpec("reward", RewardWorker, {"model_path": model_path, "config": config.reward}),
        RoleSpec(
            "critic",
            CriticWorker,
            common
            | {
                "config": config.critic,
                "total_steps": steps * _steps_an_update(config.critic, rows),
                "seed": seed,
            },
        ),
    ]
    return [spec for spec in specs if spec.name in roles]


def _steps_an_update(config: ActorConfig | CriticConfig, rows: int) -> int:
    """Optimizer steps that one batch of `rows` completions leads to."""
    size = config.ppo_mini_batch_size or rows
    return config.ppo_epochs * math.ceil(rows / size)
