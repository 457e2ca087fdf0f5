"""`trainer.placement: auto`: layout, batch budget and pools for the machines of a Ray cluster.

The one caller of `engine.planner` in training: a run's step as the planner's sizes, whether its
models fit, what a step would take, and the dtype of its models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import BaseModel
from transformers import PretrainedConfig

from engine.config import LoRAConfig, ParallelConfig, PoolConfig, RLConfig, SFTConfig
from engine.config.data import AdapterConfig
from engine.console import say
from engine.controller.placement import Pool, require_capacity
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import RequiredPasses
from engine.errors import ConfigError, EngineError, PlacementError
from engine.models import MIXTURES, resolve_dtype, text_config
from engine.parallel.decoder_plan import FAMILIES
from engine.parallel.layout import AXES, Experts, Layout, ModelShape
from engine.parallel.shard_maps import ROLLOUT_FAMILIES
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
from engine.planner.layout_search import PricedCandidate
from engine.planner.memory import Memory, estimate, fits
from engine.planner.resources import GIB, Allocation, Device, cpu, gpu, gpu_of
from engine.rollout.protocol import engine_capabilities
from engine.trainers.run_spec import (
    check_layouts,
    default_pools,
    effective_config,
    get_rollout_source,
    pool_size,
    sampler_count,
)

# One RL step of a run as the planner's sizes: for `auto` placement, and for the memory check.

_BASE_BYTES = {"": 0.0, "nf4": 0.52, "int8": 1.0}  # an element of a quantised base
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_DTYPES = {"": 0.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def run_roles(config: RLConfig) -> tuple[RequiredPasses, frozenset[str]]:
    """The passes over a batch that a run needs, and the roles that it starts."""
    dataflow = choose_dataflow(config.algorithm)
    needs = RequiredPasses.of(effective_config(config), dataflow)
    return needs, needs.roles(dataflow) | get_rollout_source(config.trainer.mode).extra_roles


def workload(
    config: RLConfig,
    *,
    model_path: str,
    lora: LoRAConfig,
    dtype: str,
    max_response_length: int,
    max_model_len: int,
) -> Workload:
    """One step of the run as sizes; raises ConfigError for a model that isn't a dense decoder."""
    needs, roles = run_roles(config)
    model_config = text_config(model_path)
    shape, kind = _shape(model_config), model_config.model_type
    actor, trainer, rollout = config.actor, config.trainer, config.rollout
    stored = _DTYPES[dtype]
    own, started = config.critic.parallel, config.critic.model_path
    rows = choose_dataflow(config.algorithm).rows_an_update(config)
    mini = actor.ppo_mini_batch_size
    windows = getattr(model_config, "sliding_window", None)
    passes = int(needs.old_log_probs) + int(needs.reference) + int("teacher" in roles)
    full_kl = actor.use_kl_loss and actor.kl_loss_type == "full"
    engine = engine_capabilities(rollout)
    critic_shape = _shape(text_config(started)) if started and "critic" in roles else None
    return Workload(
        shape,
        trainer.train_batch_size,
        rollout.n,
        max(1, max_model_len - max_response_length),
        max_response_length,
        weight_bytes=stored,
        base_bytes=_BASE_BYTES[lora.quantize],
        compute_bytes=_DTYPES[actor.parallel.compute_dtype] or stored,
        adapters=_adapters(shape, lora),
        quantized=bool(lora.quantize),
        reference="reference" in roles and not lora.rank,
        teachers=_teachers(config) if "teacher" in roles else (),
        critic="" if "critic" not in roles else Layout.of(own) if own else "as actor",
        critic_shape=critic_shape,
        critic_adapters=_adapters(critic_shape or shape, config.critic.lora),
        actor_epochs=actor.ppo_epochs,
        critic_epochs=config.critic.ppo_epochs,
        updates=-(-rows // mini) if mini else 1,
        passes=passes,
        full_kl=full_kl or needs.ref_kl,
        decodes=not engine.remote,
        decode_rows=rollout.max_num_seqs,
        kv_cache=(rollout.kv_cache_memory_mb or 0) << 20,
        memory_share=engine.memory_share,
        stays_awake=engine.stays_awake,
        samplers=sampler_count(trainer),
        sampler_bytes=_DTYPES[rollout.dtype] or stored,
        families=kind in FAMILIES and not lora.rank,
        decodes_shards=kind in ROLLOUT_FAMILIES and not lora.rank,
        cuts_sequences=kind in FAMILIES and not lora.rank and not windows,
        runs_ahead=get_rollout_source(trainer.mode).off_policy,
    )


def _teachers(config: RLConfig) -> tuple[ModelShape, ...]:
    """The models that are loaded as teachers."""
    return tuple(_shape(text_config(one)) for one in config.algorithm.teacher_models.values())


def _shape(model_config: PretrainedConfig) -> ModelShape:
    kind = model_config.model_type
    if Experts.of(model_config) is not None and kind not in MIXTURES:
        raise ConfigError(
            f"trainer.placement=auto can't price a mixture of experts of model type {kind!r} "
            f"({', '.join(MIXTURES)} it can); set actor.parallel, and trainer.placement=ray"
        )
    try:
        return ModelShape.of(model_config)
    except ConfigError as error:
        raise ConfigError(
            f"trainer.placement=auto can't price this model: {error}, and trainer.placement=ray"
        ) from error


def _adapters(shape: ModelShape, lora: AdapterConfig) -> int:
    """Elements of the adapters on all linear layers, or on the named ones."""
    if not lora.rank:
        return 0
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    wide, hidden = shape.intermediate, shape.hidden
    sides = {
        "q_proj": hidden + queries,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": queries + hidden,
        "gate_proj": hidden + wide,
        "up_proj": hidden + wide,
        "down_proj": wide + hidden,
    }
    named = lora.target_modules
    if shape.experts is not None and shape.experts.layers:  # `models.lora`
        sides = {name: size for name, size in sides.items() if name in _ATTENTION}
    chosen = sides.values() if isinstance(named, str) else [sides.get(n, 0) for n in named]
    return shape.layers * lora.rank * sum(chosen)


# `trainer.placement: auto`: layout, batch budget and pools for the machines of a Ray cluster.
#
# Runs at each start, so that an attempt that finds fewer or more machines than the one before gets
# a
# layout for those and resumes from its checkpoint (layouts and budgets may differ between
# attempts).
# Settings that differ from their defaults are kept. `engine.planner` prices the layouts.


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


# Whether a run's models fit the GPUs that it would get: asked before anything starts.
#
# Refused is only what is certain not to fit, however few tokens a micro-batch has: weights,
# gradients, moments, and rollout's copy. The estimate is the planner's (`engine.planner.memory`).

_RECOMPUTE, _OFFLOAD = {"activation_checkpointing": True}, {"offload_optimizer": True}


def check_rl_memory(
    config: RLConfig,
    cluster: Cluster,
    *,
    model_path: str,
    lora: LoRAConfig,
    dtype: str,
    max_response_length: int,
    max_model_len: int,
) -> None:
    """Raise PlacementError where a GPU of `cluster` can't hold what a rank of the run keeps.

    The sentence has the layout that would fit. With `placement: auto` it is the planner's own.
    Models that it can't price are let through.
    """
    try:
        work = workload(
            config,
            model_path=model_path,
            lora=lora,
            dtype=dtype,
            max_response_length=max_response_length,
            max_model_len=max_model_len,
        )
    except ConfigError:
        return
    if config.trainer.placement == "auto":
        plan_for(config, work, cluster, lora)
        return
    parallel = config.actor.parallel
    candidate = Candidate(
        Layout.of(parallel),
        config.rollout.tensor_parallel_size,
        offload_params=parallel.offload_params,
        offload_optimizer=parallel.offload_optimizer,
    )
    need, there = _least(estimate(work, candidate, gpu=True)), _gpu_memory(cluster)
    if need <= there:
        return
    unset = ParallelConfig(compute_dtype=parallel.compute_dtype)
    actor = config.actor.model_copy(update={"parallel": unset})
    trainer = config.trainer.model_copy(update={"placement": "auto", "pools": ()})
    free = config.model_copy(update={"actor": actor, "trainer": trainer})
    try:
        found = plan_for(free, work, cluster, lora).chosen.candidate
        instead = f"rl.actor.parallel {found.layout}"
        if found.memory_options != "-":
            instead += f" ({found.memory_options})"
        instead += f", rollout.tensor_parallel_size {found.rollout_tp} would"
    except EngineError:
        instead = f"no layout of {cluster} would: take more machines, or set model.lora.rank"
    raise PlacementError(
        f"rl can't fit: with rl.actor.parallel {candidate.layout} a GPU keeps {need / GIB:.0f} GiB "
        f"of weights, gradients, moments and rollout copy, and has {there / GIB:.0f}; {instead}"
    )


def check_sft_memory(
    config: SFTConfig,
    cluster: Cluster,
    *,
    model_path: str,
    lora: LoRAConfig,
    dtype: str,
    max_response_length: int,
    max_model_len: int,
) -> None:
    """Raise PlacementError where a GPU of `cluster` can't hold what a rank of the warm start keeps.

    The sentence has the layout that would fit. Models that the planner can't price are let through.
    """
    try:
        work = sft_workload(
            config,
            model_path=model_path,
            lora=lora,
            dtype=dtype,
            max_response_length=max_response_length,
            max_model_len=max_model_len,
        )
    except ConfigError:
        return
    need, there = _trained(sft_memory(work, config.parallel)), _gpu_memory(cluster)
    if need <= there:
        return
    tried = _sharded(config.parallel, cluster.gpus)
    found = (one for one in tried if fits(sft_memory(work, one).peak, there))
    instead = next(map(_named, found), f"no fsdp layout of {cluster.gpus} GPUs")
    raise PlacementError(
        f"sft can't fit: with sft.parallel {Layout.of(config.parallel)} a GPU keeps "
        f"{need / GIB:.0f} GiB of weights, gradients and moments, and has {there / GIB:.0f}; "
        f"{instead} would; or set model.lora.rank to train adapters, or sft.skip to begin RL with "
        "the model as it is"
    )


def sft_workload(
    config: SFTConfig,
    *,
    model_path: str,
    lora: LoRAConfig,
    dtype: str,
    max_response_length: int,
    max_model_len: int,
) -> Workload:
    """One step of the warm start as sizes; raises ConfigError as `workload` does."""
    work = workload(
        RLConfig.model_validate({"actor": {"parallel": config.parallel}}),
        model_path=model_path,
        lora=lora,
        dtype=dtype,
        max_response_length=max_response_length,
        max_model_len=max_model_len,
    )
    rows = config.train_batch_size
    return replace(work, prompts=rows, completions=1, decodes=False, reference=False)


def sft_memory(work: Workload, parallel: ParallelConfig, tokens: int = 1) -> Memory:
    """What a rank needs for micro-batches of so many tokens; nothing is kept for rollout."""
    candidate = Candidate(
        Layout.of(parallel),
        tokens=tokens,
        offload_params=parallel.offload_params,
        offload_optimizer=parallel.offload_optimizer,
        activation_checkpointing=parallel.activation_checkpointing,
    )
    return replace(estimate(work, candidate, gpu=True), rollout=0.0)


def _sharded(parallel: ParallelConfig, gpus: int) -> Iterator[ParallelConfig]:
    """FSDP layouts of so many ranks: first what costs least time, the fewest shards of these."""
    plain = dict.fromkeys(AXES, 1)
    for more in ({}, _RECOMPUTE, _RECOMPUTE | _OFFLOAD):
        for n in (n for n in range(1, gpus + 1) if gpus % n == 0):
            yield parallel.model_copy(update=plain | {"dp": gpus // n, "fsdp": n} | more)


def _named(parallel: ParallelConfig) -> str:
    """E.g. "sft.parallel dp=2 fsdp=8 activation_checkpointing=true"."""
    flags = (name for name in (*_RECOMPUTE, *_OFFLOAD) if getattr(parallel, name))
    return " ".join(["sft.parallel", str(Layout.of(parallel)), *(f"{name}=true" for name in flags)])


def _trained(memory: Memory) -> float:
    """Bytes of a model in training that no size of micro-batch makes fewer."""
    return memory.weights + memory.gradients + memory.moments


def _least(memory: Memory) -> float:
    """Bytes that no size of micro-batch or cache makes fewer."""
    return _trained(memory) + memory.rollout


def _gpu_memory(cluster: Cluster) -> int:
    """Bytes of the smallest GPU."""
    return min(machine.gpu_memory for machine in cluster.machines if machine.gpus)


# What one RL step of a configuration would take: memory of a rank and seconds, by the planner.
#
# For a dry run: the layout is the settings' own. `auto_placement` searches for one.

_HOST_GIB = 128  # of a machine's memory, a GPU; where it is not known


@dataclass(frozen=True, slots=True)
class Machines:
    """What the ranks would compute on."""

    ranks: int
    per_machine: int
    accelerator: str = ""  # by Ray's name, e.g. "H100"; empty: CPU cores of this machine


def step_estimate(config: RLConfig, work: Workload, machines: Machines) -> list[str]:
    """Lines about a rank's memory and a step's seconds."""
    parallel, rollout = config.actor.parallel, config.rollout
    candidate = Candidate(
        Layout.of(parallel),
        rollout.tensor_parallel_size,
        config.actor.max_tokens_per_micro_batch,
        offload_params=parallel.offload_params,
        offload_optimizer=parallel.offload_optimizer,
        activation_checkpointing=parallel.activation_checkpointing,
        sequence_parallel=parallel.sequence_parallel,
    )
    one = PricedCandidate(work, candidate, _allocation(machines))
    memory, price, there = one.memory, one.price, one.allocation.memory
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "moments": memory.moments,
        "activations": memory.activations,
        "rollout copy": memory.rollout,
        "cache": memory.cache,
    }
    large = {name: size / GIB for name, size in parts.items() if size >= GIB / 100}
    shown = ", ".join(f"{name} {size:.2f}" for name, size in large.items())
    fits = "fits" if one.fits else f"does not fit: {one.lacks} needs more"
    return [
        f"memory    {memory.peak / GIB:.2f} of {there / GIB:.1f} GiB a rank at most, in "
        f"{memory.when}; {fits}",
        f"          {shown or 'next to nothing'}",
        f"time      {price.total:.3g} s a step, roughly: training {price.compute:.3g}, between "
        f"ranks {price.traffic + price.switch:.3g}, rollout {price.rollout + price.ahead:.3g}",
    ]


def local_gpu() -> str:
    """The kind of this machine's first GPU, as the planner knows it; empty without one."""
    if not torch.cuda.is_available():
        return ""
    words = torch.cuda.get_device_name(0).replace("-", " ").split()
    return next((word for word in words if gpu(word).memory_gib), "GPU")


def _allocation(machines: Machines) -> Allocation:
    if machines.accelerator:
        kind = gpu(machines.accelerator)
        memory, host = int((kind.memory_gib or 80) * GIB), _HOST_GIB * int(GIB)
        return Allocation(machines.ranks, machines.per_machine, 1.0, memory, host, kind, 1.0)
    cores = max(1.0, (os.cpu_count() or 1) / machines.per_machine)
    memory = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / machines.per_machine)
    return Allocation(machines.ranks, machines.per_machine, cores, memory, memory, cpu(cores))


# The dtype of a run's models, for where they will be.


def model_dtype(dtype: str, model_path: str | Path, config: RLConfig) -> str:
    """The dtype of the run's models, `auto` resolved for where they will be.

    Raises ConfigError for one that `actor.parallel.compute_dtype` contradicts.
    """
    trainer, gpu = config.trainer, None
    if trainer.pools:
        gpu = any(pool.gpus > 0 for pool in trainer.pools if "actor" in pool.roles)
    elif trainer.placement == "ray":
        gpu = False
    elif trainer.placement == "auto" and dtype == "auto":
        gpu = cluster_has_gpus(config)
    width = text_config(model_path).hidden_size
    compute_dtype = config.actor.parallel.compute_dtype
    return resolve_dtype(dtype, width, gpu=gpu, compute_dtype=compute_dtype)
