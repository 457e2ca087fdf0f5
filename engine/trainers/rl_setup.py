"""What an RL run is made of before it starts: checks, roles and their placement."""

from __future__ import annotations

import math
import os

from engine.algorithms import advantages
from engine.algorithms.kl import check_kind
from engine.config import ActorConfig, CriticConfig, RLConfig
from engine.controller.host import RoleSpec
from engine.controller.launch import Placement, Pool
from engine.dataflows import choose_dataflow
from engine.errors import ConfigError
from engine.rewards import resolve_reward
from engine.rollout.protocol import check_engine
from engine.workers.options import advantage_options, policy_loss_options

# Roles that share the policy's process, in the order in which they are built.
_COLOCATED = ("actor", "rollout", "reference", "critic")


def check_config(config: RLConfig) -> None:
    """Raise ConfigError for a name that no registry has or a setting without effect."""
    name = config.algorithm.adv_estimator
    advantages.check_group_size(name, config.rollout.n)
    advantage_options(config.algorithm)
    policy_loss_options(config.actor)
    choose_dataflow(name)
    _check_kl("actor.kl_loss_type", config.actor.kl_loss_type)
    _check_kl("algorithm.kl_penalty", config.algorithm.kl_penalty)
    check_engine(config.rollout.engine)
    resolve_reward(config.reward.name)
    if config.trainer.threads > (os.cpu_count() or 1) * 4:
        raise ConfigError(
            f"trainer.threads={config.trainer.threads} is far more than this machine's "
            f"{os.cpu_count()} cores; set 0 for all of them"
        )


def _check_kl(setting: str, kind: str) -> None:
    check_kind(kind)
    if kind == "full":
        raise ConfigError(
            f"{setting}=full needs the distributions over the vocabulary, which the workers don't "
            "keep; use an estimate on the sampled tokens, such as low_var_kl"
        )


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
