"""What an RL run is made of before it starts: its roles, their layouts, and their placement.

The interface and the registry of rollout sources are here as well; sources are in `rollout_modes`,
checks in `run_plan`.
"""

from __future__ import annotations

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from engine.batch import Batch, Future
from engine.checkpoint.state_dict import StateDict
from engine.config import ActorConfig, CriticConfig, LoRAConfig, ParallelConfig, RLConfig
from engine.config.rl import TrainerConfig
from engine.controller.placement import Placement, Pool
from engine.controller.timeline import Span
from engine.controller.worker_host import RoleSpec
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import Dataflow, RequiredPasses
from engine.errors import ConfigError
from engine.parallel.layout import Layout, RankGrid, rollout_layout
from engine.registry import Registry
from engine.rollout.protocol import engine_capabilities
from engine.weight_transfer import Backend
from engine.workers.actor import ActorWorker
from engine.workers.agent_rollout import AgentRolloutWorker, AgentStreamWorker
from engine.workers.critic import CriticWorker
from engine.workers.frozen_models import ReferenceWorker, TeacherWorker
from engine.workers.reward_worker import RewardWorker
from engine.workers.rollout_worker import RolloutWorker, StreamRolloutWorker

if TYPE_CHECKING:
    from engine.controller.groups import Roles
    from engine.dataflows.algo import Algo
    from engine.trainers.prompts import PromptStream
    from engine.workers.role import Worker


class RolloutSource(ABC):
    """Gives each step its prompts, whose completions may be sampled already.

    Owns the prompts and all that is sampled and not used yet, with its checkpoint state. The
    defaults are those of rollout that is not ahead of the trainer.
    """

    off_policy: ClassVar[bool] = False  # completions may be of older weights than the update's
    extra_roles: ClassVar[frozenset[str]] = frozenset()  # that it calls, besides the dataflow's
    filters_groups: ClassVar[bool] = False  # drops groups without signal itself (DAPO)

    def __init__(self, spec: RunSpec, roles: Roles, prompts: PromptStream, algo: Algo) -> None:
        self.roles, self.prompts = roles, prompts

    @classmethod
    def samplers(cls, config: TrainerConfig) -> int:
        """Number of processes that only decode, with a copy of the policy."""
        return 0

    @contextmanager
    def running(self, last_step: int) -> Iterator[None]:
        """Serve the steps up to `last_step` in this block; nothing is sampled beyond it."""
        yield

    def update_weights(self, version: int) -> None:
        """Send the actor's weights, after `version` updates, to the samplers. Called each step."""
        return

    @abstractmethod
    def next_prompts(self) -> Batch:
        """The prompts of the next step; `rollout.generate` returns what is sampled of them."""

    def validate(self, prompts: Batch, version: int) -> Future[Batch]:
        """Completions of validation prompts, all by the policy after `version` updates."""
        return self.roles.rollout.generate_validation(prompts)

    def prefetch(self) -> None:
        """Prepare the prompts of the step after this one while workers are busy."""
        self.prompts.prefetch()

    def observe(self, sampled: Batch) -> None:
        self.prompts.observe(sampled)

    def metrics(self) -> dict[str, float]:
        return {}

    def take_spans(self) -> list[Span]:
        """Timeline spans since the last call, of processes that are not among the roles."""
        return []

    def state_dict(self) -> StateDict:
        """Everything that is drawn and not used yet: finished rollouts (`queue`) and `prompts`."""
        return {"queue": [], "prompts": self.prompts.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore `state_dict`; the actor's weights are restored before."""
        self.prompts.load_state_dict(state["prompts"])

    def close(self) -> None:
        """End what was started beside the roles."""
        return


_SOURCES: Registry[type[RolloutSource]] = Registry(
    "rollout source",
    "trainer.mode",
    ("engine.trainers.rollout_modes",),
    "@register_rollout_source(mode)",
)


register_rollout_source = _SOURCES.register


def rollout_source(config: TrainerConfig) -> type[RolloutSource]:
    """The source of `trainer.mode`; raise ConfigError for an unknown one."""
    return _SOURCES.get(config.mode)


def sampler_count(config: TrainerConfig) -> int:
    """Number of processes of a run that only decode, with a copy of the policy."""
    return rollout_source(config).samplers(config)


# Roles whose model is sharded like the actor's.
_AS_ACTOR = ("actor", "rollout", "reference", "teacher")


def parallel_of(role: str, config: RLConfig) -> ParallelConfig:
    """How a role's model is sharded; reference and teacher like the actor."""
    if role in _AS_ACTOR:
        return config.actor.parallel
    if role == "critic":
        return config.critic.parallel or config.actor.parallel
    if role == "sampler":  # copies, each with prompts of its own
        return ParallelConfig(dp=max(1, sampler_count(config.trainer)))
    return ParallelConfig()


def layout_of(role: str, config: RLConfig) -> Layout:
    return Layout.of(parallel_of(role, config))


def pool_size(roles: Iterable[str], config: RLConfig) -> int:
    """Processes of a pool; raises ConfigError where its roles disagree."""
    layouts = {role: layout_of(role, config) for role in roles}
    size, *others = {layout.world_size for layout in layouts.values()}
    if others:
        text = ", ".join(f"{role}: {layout}" for role, layout in layouts.items())
        raise ConfigError(
            f"roles that share processes have layouts of different sizes ({text}); make them "
            "equal, or give them pools of their own (trainer.pools)"
        )
    return size


def call_layout(role: str, config: RLConfig) -> RankGrid | None:
    """The layout over which a role's calls are split; None for one rank."""
    layout = layout_of(role, config)
    if layout.world_size == 1:
        return None
    return rollout_layout(layout, tp=rollout_tp(config)) if role == "rollout" else layout


def rollout_tp(config: RLConfig) -> int:
    """Tensor-parallel size of rollout on the actor's ranks; 1 for engines with own processes."""
    own_processes = engine_capabilities(config.rollout).own_processes
    return 1 if own_processes else config.rollout.tensor_parallel_size


# A role of your own is one module that `plugins` names:
#
#     @register_role("judge")
#     def judge(spec: RunSpec) -> RoleSpec:
#         return RoleSpec("judge", JudgeWorker, {"model_path": spec.model_path})
#
# A dataflow with "judge" among its `roles` calls it as `roles["judge"]`. It runs in a process of
# its own, unless `trainer.pools` places it.
ROLES: Registry[Callable[[RunSpec], RoleSpec]] = Registry(
    "role", "role", decorator="@register_role(name)"
)
register_role = ROLES.register


@register_role("actor")
def _actor(spec: RunSpec) -> RoleSpec:
    config = spec.config
    options = {
        "lora": spec.lora,
        "temperature": config.rollout.temperature,
        "preference": config.algorithm.preference,
        "distillation": config.algorithm.distillation,
        "sum_pi_squared": spec.needs.sum_pi_squared,
        "sampler_dtype": config.rollout.dtype,
        "delta_sync": config.trainer.delta_sync,
    }
    rows = spec.dataflow.rows_an_update(config)
    return RoleSpec(
        "actor", ActorWorker, _model(spec) | _training(spec, config.actor, rows) | options
    )


@register_role("critic")
def _critic(spec: RunSpec) -> RoleSpec:
    config = spec.config
    rows = config.trainer.train_batch_size * config.rollout.n
    options = _model(spec) | _training(spec, config.critic, rows)
    options |= {"parallel": parallel_of("critic", config)}
    if config.critic.model_path:
        options["model_path"] = config.critic.model_path
    return RoleSpec("critic", CriticWorker, options)


@register_role("rollout")
def _rollout(spec: RunSpec) -> RoleSpec:
    return RoleSpec("rollout", _rollout_class(spec), _model(spec) | _sampling(spec))


@register_role("sampler")
def _sampler(spec: RunSpec) -> RoleSpec:
    return RoleSpec("sampler", _rollout_class(spec), _sampling(spec) | _policy_copy(spec))


def _rollout_class(spec: RunSpec, *, streams: bool = False) -> type[Worker]:
    """The worker that samples completions, or episodes, in batches or as a stream."""
    if spec.config.rollout.multi_turn.enable:
        return AgentStreamWorker if streams else AgentRolloutWorker
    return StreamRolloutWorker if streams else RolloutWorker


@register_role("reference")
def _reference(spec: RunSpec) -> RoleSpec:
    options = _model(spec) | _frozen(spec) | {"base_of_policy": True}
    if spec.config.reference.offload_params:
        options["parallel"] = options["parallel"].model_copy(update={"offload_params": True})
    return RoleSpec("reference", ReferenceWorker, options)


@register_role("teacher")
def _teacher(spec: RunSpec) -> RoleSpec:
    algorithm = spec.config.algorithm
    options = {"teachers": algorithm.teachers, "settings": algorithm.distillation}
    return RoleSpec("teacher", TeacherWorker, _model(spec) | _frozen(spec) | options)


@register_role("reward")
def _reward(spec: RunSpec) -> RoleSpec:
    config = spec.config
    options = {"model_path": spec.model_path, "config": config.reward, "plugins": config.plugins}
    return RoleSpec("reward", RewardWorker, options)


def _model(spec: RunSpec) -> dict[str, Any]:
    return {"model_path": spec.model_path, "dtype": spec.dtype}


def _policy_copy(spec: RunSpec) -> dict[str, str]:
    return {"model_path": spec.model_path, "dtype": spec.config.rollout.dtype or spec.dtype}


def _sampling(spec: RunSpec) -> dict[str, object]:
    options = {
        "config": spec.config.rollout,
        "lora": spec.lora,
        "max_response_length": spec.max_response_length,
        "max_model_len": spec.max_model_len,
        "seed": spec.seed,
    }
    if spec.config.rollout.multi_turn.enable:
        options |= {"template_variables": spec.template_variables, "plugins": spec.config.plugins}
    return options


def _frozen(spec: RunSpec) -> dict[str, Any]:
    return {
        "parallel": parallel_of("reference", spec.config),
        "temperature": spec.config.rollout.temperature,
        "max_tokens_per_micro_batch": spec.config.actor.max_tokens_per_micro_batch,
    }


def _training(spec: RunSpec, role: ActorConfig | CriticConfig, rows: int) -> dict[str, Any]:
    """The role's section and its optimizer steps, in which `optim.warmup_steps` is counted too."""
    steps = role.ppo_epochs * math.ceil(rows / (role.ppo_mini_batch_size or rows))  # an update
    if role.optim.warmup_steps is not None:
        role = role.replaced({"optim.warmup_steps": role.optim.warmup_steps * steps})
    total = spec.config.trainer.total_training_steps * steps
    return {"config": role, "total_steps": total, "seed": spec.seed}


# Roles that share the policy's process, in build order.
_COLOCATED = ("actor", "rollout", "reference", "teacher", "critic")


@dataclass(frozen=True, slots=True)
class RunSpec:
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
    def dataflow(self) -> Dataflow:
        return choose_dataflow(self.config.algorithm)

    @property
    def samplers(self) -> int:
        return sampler_count(self.config.trainer)

    @property
    def sampler_threads(self) -> int:
        """CPU threads of one process that only decodes; 0 if there is none."""
        if not self.samplers:
            return 0
        return self.config.trainer.rollout_threads or max(1, self.cores // 2)

    @property
    def cores(self) -> int:
        """CPU cores of the run on this machine."""
        return self.config.trainer.threads or os.cpu_count() or 1


def placement_of(spec: RunSpec) -> Placement:
    """`trainer.pools`; by default the policy's roles share a process, others have one each."""
    config, pools = spec.config, list[Pool]()
    if config.trainer.pools:
        for pool in config.trainer.pools:
            if spec.roles.intersection(pool.roles):  # else of rollout workers, which come later
                pools.append(Pool(world_size=pool_size(pool.roles, config), **dict(pool)))
        return _placement(config, pools)
    cores = max(1, spec.cores - spec.samplers * spec.sampler_threads)
    for roles in default_pools(spec.roles):
        ranks = pool_size(roles, config)
        share = float(cores // ranks) if cores >= ranks else cores / ranks
        pools.append(Pool(roles, ranks, cpus=0.0 if pools else share))
    if "sampler" in spec.roles:
        pools.append(Pool(("sampler",), spec.samplers, cpus=float(spec.sampler_threads)))
    return _placement(config, pools)


def default_pools(roles: Collection[str]) -> list[tuple[str, ...]]:
    """The roles of each process without `trainer.pools`, the policy's first; no sampler."""
    policy = tuple(role for role in _COLOCATED if role in roles)
    return [policy, *((role,) for role in sorted({*roles} - {*policy, "sampler"}))]


def run_roles(config: RLConfig) -> tuple[RequiredPasses, frozenset[str]]:
    """The passes over a batch that a run needs, and the roles that it starts.

    With samplers the trainer has no rollout: its source stands for that role.
    """
    dataflow = choose_dataflow(config.algorithm)
    needs = RequiredPasses.of(effective_config(config), dataflow)
    apart = {"rollout"} if sampler_count(config.trainer) else set[str]()
    return needs, (needs.roles(dataflow) - apart) | rollout_source(config.trainer).extra_roles


def effective_config(config: RLConfig) -> RLConfig:
    """The settings, with importance sampling by token where off-policy rollout has none."""
    off_policy = rollout_source(config.trainer).off_policy
    if not off_policy or config.algorithm.rollout_correction.enabled:
        return config
    return config.replaced({"algorithm.rollout_correction.rollout_is": "token"})


def resolve_placement(config: RLConfig) -> RLConfig:
    """The settings with `trainer.placement` chosen: `local` where this process can hold all roles.

    Each has one rank, and rollout wants no process for itself; there are no pools, no Ray to join.
    """
    trainer = config.trainer
    if trainer.placement:
        return config
    source, engine = rollout_source(trainer), engine_capabilities(config.rollout)
    apart = (
        source.off_policy
        or source.extra_roles
        or trainer.pools
        or engine.own_processes
        or engine.exclusive
        or any(layout_of(role, config).world_size > 1 for role in ("actor", "critic"))
    )
    ray = sys.modules.get("ray")
    joined = bool(os.environ.get("RAY_ADDRESS")) or (ray is not None and ray.is_initialized())
    return config.replaced({"trainer.placement": "ray" if apart or joined else "local"})


def check_lora(lora: LoRAConfig, config: RLConfig) -> None:
    """Raise ConfigError if the rollout engine can't decode with adapters."""
    if lora.rank and not engine_capabilities(config.rollout).adapters:
        raise ConfigError(
            f"model.lora.rank={lora.rank} with rollout.engine={config.rollout.engine}, which "
            "doesn't decode with adapters; set rollout.engine to native, vllm or server, or "
            "model.lora.rank=0"
        )


def rollout_worker_placement(name: str, spec: RunSpec) -> Placement:
    """Placement of one process of asynchronous rollout: the pool `sampler`, if there is one."""
    pool = Pool((name,), cpus=float(spec.sampler_threads))
    for given in spec.config.trainer.pools:
        if given.roles == ("sampler",):
            pool = Pool(**dict(given) | {"roles": (name,)})
    return _placement(spec.config, [pool])


def broadcast_backend(spec: RunSpec) -> Backend | None:
    """What broadcasts weights to samplers; None: they go through Ray's store.

    Raises ConfigError for a `trainer.weight_transfer` that this run can't have.
    """
    trainer, rollout = spec.config.trainer, spec.config.rollout
    if trainer.mode != "async" or (backend := trainer.weight_transfer) == "store":
        return None
    placements = placement_of(spec), rollout_worker_placement("sampler0", spec)
    pools = [p for placed in placements for p in placed.pools if {"actor", "sampler0"} & {*p.roles}]
    obstacles = {
        f"rollout.engine={rollout.engine}, unless it is vllm without quantization": (
            not engine_capabilities(rollout).receives
        ),
        f"model.lora.rank={spec.lora.rank}, as adapters are small": spec.lora.rank > 0,
        "trainer.delta_sync": trainer.delta_sync,
        "trainer.placement=local": trainer.placement == "local",
        "pools without whole GPUs": backend != "gloo" and min(pool.gpus for pool in pools) < 1,
    }
    obstacle = next((text for text, hinders in obstacles.items() if hinders), "")
    if backend == "auto":
        return None if obstacle else "nccl"
    if obstacle:
        raise ConfigError(f"trainer.weight_transfer={backend} can't go with {obstacle}; set auto")
    return backend


def _placement(config: RLConfig, pools: Iterable[Pool]) -> Placement:
    trainer = config.trainer
    return Placement(
        pools=tuple(pools),
        kind="local" if trainer.placement == "local" else "ray",  # others are resolved
        start_timeout_s=trainer.start_timeout_s,
        call_timeout_s=trainer.step_timeout_s,
        timeline=trainer.timeline_steps > 0,
    )


def role_specs(spec: RunSpec) -> list[RoleSpec]:
    """How to build each role of the run; raises ConfigError for a role that isn't registered."""
    config, plugins = spec.config, spec.config.plugins
    return [
        replace(ROLES.get(name)(spec), name=name, layout=call_layout(name, config), plugins=plugins)
        for name in sorted(spec.roles)
    ]


def rollout_worker_spec(name: str, spec: RunSpec) -> RoleSpec:
    options = _sampling(spec) | _policy_copy(spec)
    worker = _rollout_class(spec, streams=True)
    return RoleSpec(name, worker, options, plugins=spec.config.plugins)
