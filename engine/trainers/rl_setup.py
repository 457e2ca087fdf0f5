"""What an RL run is made of before it starts: its roles and their placement."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config import ActorConfig, CriticConfig, LoRAConfig, RLConfig
from engine.controller.launch import Placement, Pool
from engine.controller.worker_host import RoleSpec
from engine.dataflows import choose_dataflow
from engine.dataflows.required_passes import RequiredPasses
from engine.errors import ConfigError
from engine.trainers.layouts import mesh_of, parallel_of, pool_size

# Roles that share the policy's process, in the order in which they are built.
_COLOCATED = ("actor", "rollout", "reference", "teacher", "critic")


def effective(config: RLConfig) -> RLConfig:
    """The settings with what a mode implies: where rollout runs ahead, its tokens are weighted.

    Truncated importance sampling by token, unless a correction is configured.
    """
    if config.trainer.mode == "sync" or config.algorithm.rollout_correction.enabled:
        return config
    correction = config.algorithm.rollout_correction.model_copy(update={"rollout_is": "token"})
    algorithm = config.algorithm.model_copy(update={"rollout_correction": correction})
    return config.model_copy(update={"algorithm": algorithm})


def check_lora(lora: LoRAConfig, config: RLConfig) -> None:
    """Raise ConfigError where adapters and the rollout engine don't go together."""
    if lora.rank and config.rollout.engine not in ("native", "vllm"):
        raise ConfigError(
            f"model.lora.rank={lora.rank} with rollout.engine={config.rollout.engine}: only native "
            "and vllm decode with adapters; set rollout.engine to one of them, or model.lora.rank=0"
        )


@dataclass(frozen=True, slots=True)
class Build:
    """All that the roles of a run are built from."""

    model_path: str
    config: RLConfig
    needs: RequiredPasses
    roles: frozenset[str]
    max_response_length: int
    max_model_len: int
    seed: int
    dtype: str = "float32"
    lora: LoRAConfig = field(default_factory=LoRAConfig)

    @property
    def sampler_threads(self) -> int:
        """Cores of a process that only decodes; 0 where there is none."""
        if self.config.trainer.mode == "sync":
            return 0
        return self.config.trainer.rollout_threads or max(1, self.cores // 2)

    @property
    def samplers(self) -> int:
        """Processes that only decode."""
        counts = {"one_step_off": 1, "async": self.config.trainer.rollout_workers}
        return counts.get(self.config.trainer.mode, 0)

    @property
    def cores(self) -> int:
        """Cores of the whole run."""
        return self.config.trainer.threads or os.cpu_count() or 1


def place(build: Build) -> Placement:
    """The policy's roles in one process, the reward in another, a sampler in a third.

    The trainer's process has the cores that those which only decode leave. `trainer.pools` says
    otherwise.
    """
    if build.config.trainer.pools:
        sized = [
            Pool(world_size=pool_size(pool.roles, build.config), **dict(pool))
            for pool in build.config.trainer.pools
        ]
        return _placement(build.config, tuple(sized))
    taken = build.samplers * build.sampler_threads
    policy = tuple(role for role in _COLOCATED if role in build.roles)
    pools = [Pool(policy, cpus=float(max(1, build.cores - taken))), Pool(("reward",), cpus=0.0)]
    if "sampler" in build.roles:
        pools.append(Pool(("sampler",), cpus=float(build.sampler_threads)))
    pools = [replace(pool, **_ranks(pool, build)) for pool in pools]
    return _placement(build.config, tuple(pools))


def _ranks(pool: Pool, build: Build) -> dict[str, Any]:
    """How many processes a pool is, which share the cores that it has."""
    size = pool_size(pool.roles, build.config)
    each = pool.cpus // size if pool.cpus >= size else pool.cpus / size
    return {"world_size": size, "cpus": each}


def stream_placement(name: str, build: Build) -> Placement:
    """One process of asynchronous rollout."""
    return _placement(build.config, (Pool((name,), cpus=float(build.sampler_threads)),))


def _placement(config: RLConfig, pools: tuple[Pool, ...]) -> Placement:
    return Placement(
        pools=pools,
        kind="local" if config.trainer.placement == "local" else "ray",  # auto is resolved before
        start_timeout_s=config.trainer.start_timeout_s,
        call_timeout_s=config.trainer.step_timeout_s,
        timeline=config.trainer.timeline_steps > 0,
    )


def role_specs(build: Build) -> list[RoleSpec]:
    """How to build each role of the run."""
    from engine.workers.actor import ActorWorker
    from engine.workers.critic import CriticWorker
    from engine.workers.reference import ReferenceWorker
    from engine.workers.reward import RewardWorker
    from engine.workers.rollout import RolloutWorker

    config = build.config
    steps, rows = config.trainer.total_training_steps, _rows(config)
    learned = choose_dataflow(config.algorithm).rows_an_update(config)
    common = {"model_path": build.model_path, "dtype": build.dtype}
    frozen = {
        "parallel": parallel_of("reference", config),
        "temperature": config.rollout.temperature,
        "max_tokens_per_micro_batch": config.actor.max_tokens_per_micro_batch,
    }
    actor = {
        "config": config.actor,
        "lora": build.lora,
        "temperature": config.rollout.temperature,
        "total_steps": steps * _steps_an_update(config.actor, learned),
        "seed": build.seed,
        "preference": config.algorithm.preference,
        "sum_pi_squared": build.needs.sum_pi_squared,
        "plugins": config.plugins,
        "sampler_dtype": config.rollout.dtype,
        "delta_sync": config.trainer.delta_sync,
    }
    critic = {
        "config": config.critic,
        "total_steps": steps * _steps_an_update(config.critic, rows),
        "seed": build.seed,
        "parallel": parallel_of("critic", config),
    }
    own = config.rollout
    if build.samplers:  # beside them, the trainer's own rollout role only validates
        tp = config.actor.parallel.tp
        own = own.model_copy(update={"engine": "native", "tensor_parallel_size": tp})
    reward = {"model_path": build.model_path, "config": config.reward}
    specs = [
        RoleSpec("actor", ActorWorker, common | actor),
        RoleSpec("rollout", RolloutWorker, common | _sampling(build) | {"config": own}),
        RoleSpec("sampler", RolloutWorker, common | _sampling(build) | _copied(build)),
        RoleSpec("reference", ReferenceWorker, common | frozen | {"base_of_policy": True}),
        RoleSpec(
            "teacher", ReferenceWorker, common | frozen | {"model_path": config.algorithm.teacher}
        ),
        RoleSpec("reward", RewardWorker, reward),
        RoleSpec("critic", CriticWorker, common | critic),
    ]
    return [
        replace(spec, mesh=mesh_of(spec.name, config)) for spec in specs if spec.name in build.roles
    ]


def stream_spec(name: str, build: Build) -> RoleSpec:
    """How to build one worker of asynchronous rollout."""
    from engine.workers.stream_rollout import StreamRolloutWorker

    common = {"model_path": build.model_path}
    return RoleSpec(name, StreamRolloutWorker, common | _sampling(build) | _copied(build))


def _sampling(build: Build) -> dict[str, Any]:
    return {
        "config": build.config.rollout,
        "lora": build.lora,
        "max_response_length": build.max_response_length,
        "max_model_len": build.max_model_len,
        "seed": build.seed,
    }


def _copied(build: Build) -> dict[str, Any]:
    """What differs where the policy is a copy."""
    return {"dtype": build.config.rollout.dtype or build.dtype}


def _rows(config: RLConfig) -> int:
    return config.trainer.train_batch_size * config.rollout.n


def _steps_an_update(config: ActorConfig | CriticConfig, rows: int) -> int:
    """Optimizer steps that an update with `rows` completions takes."""
    size = config.ppo_mini_batch_size or rows
    return config.ppo_epochs * math.ceil(rows / size)
