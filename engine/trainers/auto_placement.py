"""`trainer.placement: auto`: layout, batch budget and pools for the machines of a Ray cluster.

Runs at each start, so that an attempt that finds fewer or more machines than the one before gets a
layout for those and resumes from its checkpoint (layouts and budgets may differ between attempts).
Settings that differ from their defaults are kept. `engine.planner` prices the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from pydantic import BaseModel

from engine.config import LoRAConfig, ParallelConfig, PoolConfig, RLConfig
from engine.console import say
from engine.controller.launch import Pool
from engine.controller.placement import require_capacity
from engine.dataflows import choose_dataflow
from engine.errors import ConfigError, EngineError
from engine.parallel.layout import AXES
from engine.planner import (
    Candidate,
    Cluster,
    FixedSettings,
    PlacementPlan,
    SamplerChoices,
    Samplers,
    Workload,
    explain,
    read_cluster,
    search,
    search_apart,
)
from engine.planner.hardware import Device, gpu_of
from engine.planner.resources import Allocation
from engine.rollout.protocol import engine_capabilities
from engine.trainers.layouts import check_layouts, pool_size
from engine.trainers.rl_setup import default_pools
from engine.trainers.rollout_sources import sampler_count
from engine.trainers.workload import run_roles, workload


def gpu_kinds(config: RLConfig) -> dict[str, Device]:
    """`trainer.gpu_kinds` as the planner has them."""
    return {n: gpu_of(n, **dict(kind)) for n, kind in config.trainer.gpu_kinds.items()}


def cluster_has_gpus(config: RLConfig) -> bool:
    """Whether the planner would find a GPU now."""
    return read_cluster(gpu_kinds(config)).gpus > 0


def resolve_auto(
    config: RLConfig,
    *,
    model_path: str,
    lora: LoRAConfig,
    dtype: str,
    max_response_length: int,
    max_model_len: int,
    cluster: Callable[[], Cluster] | None = None,
) -> RLConfig:
    """The settings with layout, budget and pools for the machines that are there now.

    Prints the choice and why. Settings with another placement come back as they are. Raises
    ConfigError for a model that the planner can't price, or settings that leave no layout, and
    PlacementError where none fits.
    """
    if config.trainer.placement != "auto":
        return config
    work = workload(
        config,
        model_path=model_path,
        lora=lora,
        dtype=dtype,
        max_response_length=max_response_length,
        max_model_len=max_model_len,
    )
    there = cluster() if cluster else read_cluster(gpu_kinds(config))
    plan = plan_for(config, work, there, lora)
    say(explain(plan))
    chosen, (_, roles) = plan.chosen, run_roles(config)
    return apply_candidate(config, chosen.candidate, chosen.allocation, roles, chosen.work.ahead)


def plan_for(config: RLConfig, work: Workload, cluster: Cluster, lora: LoRAConfig) -> PlacementPlan:
    """Search the layouts that the settings leave open and the trainer accepts."""
    _, roles = run_roles(config)
    mode, nodes = config.trainer.mode, [machine.node for machine in cluster.machines]
    pools = config.trainer.pools
    wanted = next((pool.gpus for pool in pools if "actor" in pool.roles), 1.0)
    usable = cluster if wanted else cluster.without_gpus()
    apart = bool(usable.gpus and work.samplers and work.decodes)
    if apart and not pools and usable.gpus < 2:
        raise ConfigError(
            f"trainer.placement=auto with trainer.mode={mode} wants a GPU for the trainer "
            "and one for rollout, and there is one; set trainer.mode=sync"
        )
    half = config.trainer.rollout_threads or max(1, int(_cores(usable)) // 2)
    reserved_cpus = 0.0 if usable.gpus else float(work.samplers * half)

    def refuse(candidate: Candidate, allocation: Allocation, ahead: Samplers | None) -> str:
        try:
            settings = apply_candidate(config, candidate, allocation, roles, ahead)
            check_layouts(settings, lora)
            _check_rows(settings, candidate)
            sized = [
                Pool(world_size=pool_size(pool.roles, settings), **dict(pool))
                for pool in settings.trainer.pools
            ]
            require_capacity(sized, nodes)
        except EngineError as error:
            return str(error).splitlines()[0]
        return ""

    def plan(part: Workload, machines: Cluster) -> PlacementPlan:
        return search(
            part,
            machines,
            fixed_settings(config),
            lambda candidate, allocation: refuse(candidate, allocation, part.ahead),
            reserved_cpus,
        )

    if not apart or pools:
        return plan(work, usable)
    found = search_apart(work, usable, _sampler_choices(config, usable), plan)
    return replace(found, cluster=usable, together=_together(config, work, usable))


def _sampler_choices(config: RLConfig, cluster: Cluster) -> SamplerChoices:
    """What the settings leave open of the processes that only decode."""
    rollout, workers = config.rollout, config.trainer.rollout_workers
    tp, most = rollout.tensor_parallel_size, max(machine.gpus for machine in cluster.machines)
    several = "vllm" in engine_capabilities(rollout).settings  # a sampler takes several GPUs
    sizes = [n for n in range(1, most + 1) if most % n == 0] if several else [1]
    return SamplerChoices(
        counts=[workers] if workers > 1 else None, sizes=[tp] if tp > 1 else sizes
    )


def _together(config: RLConfig, work: Workload, cluster: Cluster) -> float | None:
    """Seconds of a step whose rollout and update take turns on all GPUs; None where none fits."""
    turns = replace(work, runs_ahead=False, samplers=0)
    try:
        return search(turns, cluster, fixed_settings(config)).chosen.price.total
    except EngineError:
        return None


def apply_candidate(
    config: RLConfig,
    candidate: Candidate,
    allocation: Allocation,
    roles: Collection[str],
    ahead: Samplers | None = None,
) -> RLConfig:
    """The settings with a candidate's layout and budget, and the samplers, placed on Ray."""
    changes: dict[str, object] = {axis: getattr(candidate.layout, axis) for axis in AXES}
    for name in ("offload_params", "offload_optimizer", "activation_checkpointing"):
        changes[name] = getattr(candidate, name)
    tokens = {"max_tokens_per_micro_batch": candidate.tokens}
    parallel = config.actor.parallel.model_copy(update=changes)
    actor = config.actor.model_copy(
        update={"parallel": parallel} | _if_default(config.actor, tokens)
    )
    critic = config.critic
    if "critic" in roles:
        critic = critic.model_copy(update=_if_default(critic, tokens))
    placed: dict[str, object] = {"placement": "ray"}
    rollout = config.rollout
    if not sampler_count(config.trainer):
        rollout = rollout.model_copy(update={"tensor_parallel_size": candidate.rollout_tp})
    else:
        placed["rollout_threads"] = _sampler_threads(config, allocation)
    if ahead is not None:
        placed["rollout_workers"] = ahead.count
        rollout = rollout.model_copy(update={"tensor_parallel_size": ahead.tp})
        if ahead.tp > 1:
            vllm = rollout.vllm.model_copy(update={"in_process": False})
            rollout = rollout.model_copy(update={"vllm": vllm})
    placed["pools"] = config.trainer.pools or _pools(config, allocation, roles, ahead)
    trainer = config.trainer.model_copy(update=placed)
    return config.model_copy(
        update={"actor": actor, "critic": critic, "rollout": rollout, "trainer": trainer}
    )


def fixed_settings(config: RLConfig) -> FixedSettings:
    """The settings that the user has changed from their defaults, which the planner keeps."""
    parallel, plain = config.actor.parallel, ParallelConfig()
    axes = {axis: getattr(parallel, axis) for axis in AXES}
    tokens = config.actor.max_tokens_per_micro_batch
    return FixedSettings(
        axes={axis: size for axis, size in axes.items() if size != getattr(plain, axis)},
        rollout_tp=config.rollout.tensor_parallel_size
        if config.rollout.tensor_parallel_size > 1
        else None,
        tokens=tokens
        if _if_default(config.actor, {"max_tokens_per_micro_batch": 0}) == {}
        else None,
        offload_params=parallel.offload_params,
        offload_optimizer=parallel.offload_optimizer,
        activation_checkpointing=parallel.activation_checkpointing,
        sequence_parallel=parallel.sequence_parallel,
    )


def _if_default(section: BaseModel, values: Mapping[str, object]) -> dict[str, object]:
    """Those of `values` whose setting has its default in `section`."""
    fields = type(section).model_fields
    return {k: v for k, v in values.items() if getattr(section, k) == fields[k].default}


def _pools(
    config: RLConfig, allocation: Allocation, roles: Collection[str], ahead: Samplers | None
) -> tuple[PoolConfig, ...]:
    """A pool for the policy's roles, and one for each other role; of several samplers, of each."""
    cpus = allocation.cpus
    if config.trainer.threads:
        cpus = min(cpus, max(1.0, config.trainer.threads // allocation.per_machine))
    policy, *others = default_pools(roles)
    pools = [PoolConfig(roles=policy, cpus=cpus, gpus=allocation.gpus)]
    pools += [PoolConfig(roles=role, cpus=0.0) for role in others]
    if "sampler" in roles or ahead is not None:
        threads = float(_sampler_threads(config, allocation))
        gpus = float(ahead.tp) if ahead is not None else 0.0
        pools.append(PoolConfig(roles=("sampler",), cpus=threads, gpus=gpus))
    return tuple(pools)


def _sampler_threads(config: RLConfig, allocation: Allocation) -> int:
    """CPU threads of a sampler: a rank's cores on a GPU, else half of its machine's."""
    if config.trainer.rollout_threads:
        return config.trainer.rollout_threads
    samplers = max(1, sampler_count(config.trainer))
    return max(
        1, int(allocation.cpus) if allocation.gpus else int(allocation.reserved_cpus) // samplers
    )


def _cores(cluster: Cluster) -> float:
    """Cores of the largest machine."""
    return max(machine.cpus for machine in cluster.machines)


def _check_rows(config: RLConfig, candidate: Candidate) -> None:
    """Raise ConfigError if a data-parallel rank would have no rows of some mini-batch."""
    layout = candidate.layout
    learned = choose_dataflow(config.algorithm).rows_an_update(config)
    every = config.trainer.train_batch_size * config.rollout.n
    for rows, size in (
        (learned, config.actor.ppo_mini_batch_size),
        (every, config.critic.ppo_mini_batch_size),
    ):
        count = -(-rows // size) if size else 1
        if rows // layout.data_ranks < count:
            raise ConfigError(
                f"{rows} completions on {layout.data_ranks} data-parallel ranks are too few for "
                f"{count} mini-batches; raise ppo_mini_batch_size"
            )
