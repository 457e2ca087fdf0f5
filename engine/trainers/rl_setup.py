"""What an RL run is made of before it starts: its roles and their placement."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from engine.config import LoRAConfig, RLConfig
from engine.controller.launch import Placement, Pool
from engine.controller.worker_host import RoleSpec
from engine.dataflows.required_passes import RequiredPasses
from engine.errors import ConfigError
from engine.rollout.protocol import engine_capabilities
from engine.trainers.layouts import call_layout, layout_of, pool_size
from engine.trainers.role_registry import ROLES, stream_sampler
from engine.trainers.rollout_sources import get_rollout_source, sampler_count

# Roles that share the policy's process, in build order.
_COLOCATED = ("actor", "rollout", "reference", "teacher", "critic")


def effective_config(config: RLConfig) -> RLConfig:
    """The settings with what the mode implies: off-policy rollout gets an importance correction.

    Truncated importance sampling by token, unless a correction is configured.
    """
    off_policy = get_rollout_source(config.trainer.mode).off_policy
    if not off_policy or config.algorithm.rollout_correction.enabled:
        return config
    correction = config.algorithm.rollout_correction.model_copy(update={"rollout_is": "token"})
    algorithm = config.algorithm.model_copy(update={"rollout_correction": correction})
    return config.model_copy(update={"algorithm": algorithm})


def resolve_placement(config: RLConfig) -> RLConfig:
    """The settings with `trainer.placement` chosen where they leave it open.

    `local` where this process can hold all roles: each has one rank, rollout waits for training and
    wants no process for itself, there are no pools, and no Ray to join. Else `ray`.
    """
    trainer = config.trainer
    if trainer.placement:
        return config
    source, engine = get_rollout_source(trainer.mode), engine_capabilities(config.rollout)
    apart = (
        source.off_policy
        or source.extra_roles
        or trainer.pools
        or engine.own_processes
        or engine.exclusive
        or any(layout_of(role, config).world_size > 1 for role in ("actor", "critic"))
    )
    placement = "ray" if apart or _is_ray_there() else "local"
    return config.model_copy(
        update={"trainer": trainer.model_copy(update={"placement": placement})}
    )


def _is_ray_there() -> bool:
    """Whether this process has joined a Ray, or is told to."""
    ray = sys.modules.get("ray")
    return bool(os.environ.get("RAY_ADDRESS")) or (ray is not None and ray.is_initialized())


def check_lora(lora: LoRAConfig, config: RLConfig) -> None:
    """Raise ConfigError if the rollout engine can't decode with adapters."""
    if lora.rank and not engine_capabilities(config.rollout).adapters:
        raise ConfigError(
            f"model.lora.rank={lora.rank} with rollout.engine={config.rollout.engine}, which "
            "doesn't decode with adapters; set rollout.engine to native, vllm or server, or "
            "model.lora.rank=0"
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
    template_variables: Mapping[str, object] = field(default_factory=dict)  # of the chat template

    @property
    def sampler_threads(self) -> int:
        """CPU threads of one process that only decodes; 0 if there is none."""
        if not self.samplers:
            return 0
        return self.config.trainer.rollout_threads or max(1, self.cores // 2)

    @property
    def samplers(self) -> int:
        """Number of processes that only decode."""
        return sampler_count(self.config.trainer)

    @property
    def cores(self) -> int:
        """CPU cores of the run on this machine."""
        return self.config.trainer.threads or os.cpu_count() or 1


def placement_of(spec: RunSpec) -> Placement:
    """`trainer.pools`; by default the policy's roles share a process, others have one each.

    The policy's process gets the cores that samplers leave.
    """
    if spec.config.trainer.pools:
        sized = [
            Pool(world_size=pool_size(pool.roles, spec.config), **dict(pool))
            for pool in spec.config.trainer.pools
            if spec.roles.intersection(pool.roles)  # else of rollout workers, which come later
        ]
        return _placement(spec.config, tuple(sized))
    taken = spec.samplers * spec.sampler_threads
    policy, *others = default_pools(spec.roles)
    pools = [_with_ranks(Pool(policy, cpus=float(max(1, spec.cores - taken))), spec.config)]
    pools += [_with_ranks(Pool(roles, cpus=0.0), spec.config) for roles in others]
    if "sampler" in spec.roles:
        cpus = float(spec.sampler_threads)
        pools.append(Pool(("sampler",), world_size=spec.samplers, cpus=cpus))
    return _placement(spec.config, tuple(pools))


def default_pools(roles: Collection[str]) -> list[tuple[str, ...]]:
    """The roles of each process without `trainer.pools`, the policy's first; no sampler."""
    policy = tuple(role for role in _COLOCATED if role in roles)
    return [policy, *((role,) for role in sorted({*roles} - {*policy, "sampler"}))]


def _with_ranks(pool: Pool, config: RLConfig) -> Pool:
    """The pool with the number of processes of its layout, which share its cores."""
    size = pool_size(pool.roles, config)
    each = pool.cpus // size if pool.cpus >= size else pool.cpus / size
    return replace(pool, world_size=size, cpus=each)


def rollout_worker_placement(name: str, spec: RunSpec) -> Placement:
    """Placement of one process of asynchronous rollout: the pool `sampler`, if there is one."""
    given = next((p for p in spec.config.trainer.pools if p.roles == ("sampler",)), None)
    pool = Pool((name,), cpus=float(spec.sampler_threads))
    if given is not None:
        pool = Pool(**dict(given) | {"roles": (name,)})
    return _placement(spec.config, (pool,))


def _placement(config: RLConfig, pools: tuple[Pool, ...]) -> Placement:
    return Placement(
        pools=pools,
        kind="local" if config.trainer.placement == "local" else "ray",  # others are resolved
        start_timeout_s=config.trainer.start_timeout_s,
        call_timeout_s=config.trainer.step_timeout_s,
        timeline=config.trainer.timeline_steps > 0,
    )


def role_specs(spec: RunSpec) -> list[RoleSpec]:
    """How to build each role of the run; raises ConfigError for a role that isn't registered."""
    config = spec.config
    return [
        replace(
            ROLES.get(name)(spec),
            name=name,
            layout=call_layout(name, config),
            plugins=config.plugins,
        )
        for name in sorted(spec.roles)
    ]


def rollout_worker_spec(name: str, spec: RunSpec) -> RoleSpec:
    """How to build one worker of asynchronous rollout."""
    return replace(stream_sampler(name, spec), plugins=spec.config.plugins)
