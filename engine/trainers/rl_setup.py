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

# Roles that share the policy's process, in build order.
COLOCATED = ("actor", "rollout", "reference", "teacher", "critic")


def effective_config(config: RLConfig) -> RLConfig:
    """The settings with what the mode implies: off-policy rollout gets an importance correction.

    Truncated importance sampling by token, unless a correction is configured.
    """
    if config.trainer.mode == "sync" or config.algorithm.rollout_correction.enabled:
        return config
    correction = config.algorithm.rollout_correction.model_copy(update={"rollout_is": "token"})
    algorithm = config.algorithm.model_copy(update={"rollout_correction": correction})
    return config.model_copy(update={"algorithm": algorithm})


def check_lora(lora: LoRAConfig, config: RLConfig) -> None:
    """Raise ConfigError if the rollout engine can't decode with adapters."""
    if lora.rank and config.rollout.engine not in ("native", "vllm"):
        raise ConfigError(
            f"model.lora.rank={lora.rank} with rollout.engine={config.rollout.engine}: only native "
            "and vllm decode with adapters; set rollout.engine to one of them, or model.lora.rank=0"
        )


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Everything that the roles of a run are built from."""

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
        """CPU threads of one process that only decodes; 0 if there is none."""
        if self.config.trainer.mode == "sync":
            return 0
        return self.config.trainer.rollout_threads or max(1, self.cores // 2)

    @property
    def samplers(self) -> int:
        """Number of processes that only decode."""
        counts = {"one_step_off": 1, "async": self.config.trainer.rollout_workers}
        return counts.get(self.config.trainer.mode, 0)

    @property
    def cores(self) -> int:
        """CPU cores of the run on this machine."""
        return self.config.trainer.threads or os.cpu_count() or 1


def placement_of(spec: RunSpec) -> Placement:
    """`trainer.pools`; by default the policy's roles share a process, reward and sampler have one
    each.

    The policy's process gets the cores that samplers leave.
    """
    if spec.config.trainer.pools:
        sized = [
            Pool(world_size=pool_size(pool.roles, spec.config), **dict(pool))
            for pool in spec.config.trainer.pools
        ]
        return _placement(spec.config, tuple(sized))
    taken = spec.samplers * spec.sampler_threads
    policy = tuple(role for role in COLOCATED if role in spec.roles)
    pools = [Pool(policy, cpus=float(max(1, spec.cores - taken))), Pool(("reward",), cpus=0.0)]
    if "sampler" in spec.roles:
        pools.append(Pool(("sampler",), cpus=float(spec.sampler_threads)))
    pools = [replace(pool, **_pool_ranks(pool, spec)) for pool in pools]
    return _placement(spec.config, tuple(pools))


def _pool_ranks(pool: Pool, spec: RunSpec) -> dict[str, Any]:
    """The pool's number of processes, and the cores of each."""
    size = pool_size(pool.roles, spec.config)
    each = pool.cpus // size if pool.cpus >= size else pool.cpus / size
    return {"world_size": size, "cpus": each}


def rollout_worker_placement(name: str, spec: RunSpec) -> Placement:
    """Placement of one process of asynchronous rollout."""
    return _placement(spec.config, (Pool((name,), cpus=float(spec.sampler_threads)),))


def _placement(config: RLConfig, pools: tuple[Pool, ...]) -> Placement:
    return Placement(
        pools=pools,
        kind="local" if config.trainer.placement == "local" else "ray",  # auto is resolved before
        start_timeout_s=config.trainer.start_timeout_s,
        call_timeout_s=config.trainer.step_timeout_s,
        timeline=config.trainer.timeline_steps > 0,
    )


def role_specs(spec: RunSpec) -> list[RoleSpec]:
    """How to build each role of the run."""
    from engine.workers.actor import ActorWorker
    from engine.workers.critic import CriticWorker
    from engine.workers.reference import ReferenceWorker
    from engine.workers.reward import RewardWorker
    from engine.workers.rollout import RolloutWorker

    config = spec.config
    steps, rows = config.trainer.total_training_steps, _completions_per_step(config)
    learned = choose_dataflow(config.algorithm).rows_an_update(config)
    common = {"model_path": spec.model_path, "dtype": spec.dtype}
    frozen = {
        "parallel": parallel_of("reference", config),
        "temperature": config.rollout.temperature,
        "max_tokens_per_micro_batch": config.actor.max_tokens_per_micro_batch,
    }
    actor = {
        "config": config.actor,
        "lora": spec.lora,
        "temperature": config.rollout.temperature,
        "total_steps": steps * _optimizer_steps_per_update(config.actor, learned),
        "seed": spec.seed,
        "preference": config.algorithm.preference,
        "sum_pi_squared": spec.needs.sum_pi_squared,
        "sampler_dtype": config.rollout.dtype,
        "delta_sync": config.trainer.delta_sync,
    }
    critic = {
        "config": config.critic,
        "total_steps": steps * _optimizer_steps_per_update(config.critic, rows),
        "seed": spec.seed,
        "parallel": parallel_of("critic", config),
    }
    own_rollout = config.rollout
    if spec.samplers:  # beside them, the trainer's own rollout role only validates
        tp = config.actor.parallel.tp
        own_rollout = own_rollout.model_copy(
            update={"engine": "native", "tensor_parallel_size": tp}
        )
    reward = {"model_path": spec.model_path, "config": config.reward}
    specs = [
        RoleSpec("actor", ActorWorker, common | actor),
        RoleSpec(
            "rollout", RolloutWorker, common | _rollout_options(spec) | {"config": own_rollout}
        ),
        RoleSpec("sampler", RolloutWorker, common | _rollout_options(spec) | _copy_options(spec)),
        RoleSpec("reference", ReferenceWorker, common | frozen | {"base_of_policy": True}),
        RoleSpec(
            "teacher", ReferenceWorker, common | frozen | {"model_path": config.algorithm.teacher}
        ),
        RoleSpec("reward", RewardWorker, reward),
        RoleSpec("critic", CriticWorker, common | critic),
    ]
    return [
        replace(role, mesh=mesh_of(role.name, config), plugins=config.plugins)
        for role in specs
        if role.name in spec.roles
    ]


def rollout_worker_spec(name: str, spec: RunSpec) -> RoleSpec:
    """How to build one worker of asynchronous rollout."""
    from engine.workers.stream_rollout import StreamRolloutWorker

    common = {"model_path": spec.model_path}
    options = common | _rollout_options(spec) | _copy_options(spec)
    return RoleSpec(name, StreamRolloutWorker, options, plugins=spec.config.plugins)


def _rollout_options(spec: RunSpec) -> dict[str, Any]:
    return {
        "config": spec.config.rollout,
        "lora": spec.lora,
        "max_response_length": spec.max_response_length,
        "max_model_len": spec.max_model_len,
        "seed": spec.seed,
    }


def _copy_options(spec: RunSpec) -> dict[str, Any]:
    """Options of a sampler, which has a copy of the policy."""
    return {"dtype": spec.config.rollout.dtype or spec.dtype}


def _completions_per_step(config: RLConfig) -> int:
    return config.trainer.train_batch_size * config.rollout.n


def _optimizer_steps_per_update(config: ActorConfig | CriticConfig, rows: int) -> int:
    """Optimizer steps of one update with `rows` completions."""
    size = config.ppo_mini_batch_size or rows
    return config.ppo_epochs * math.ceil(rows / size)
