"""`trainer.placement: auto`: layout, batch budget and pools for the machines of a Ray cluster.

The one caller of `engine.planner` in training: a run's step as the planner's sizes, whether its
models fit, what a step would take, and the dtype of its models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

import torch
from pydantic import BaseModel
from transformers import PretrainedConfig

from engine import planner
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
from engine.planner.layout_search import PricedCandidate
from engine.planner.memory import Memory, estimate, usable_bytes
from engine.planner.resources import GIB, Allocation, Device, cpu, gpu, gpu_of
from engine.rollout.protocol import engine_capabilities
from engine.trainers import run_spec
from engine.trainers.layout_checks import check_layouts

_BASE_BYTES = {"": 0.0, "nf4": 0.52, "int8": 1.0}  # an element of a quantised base
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MEMORY_OPTIONS = ("offload_params", "offload_optimizer", "activation_checkpointing")
_DTYPES = {"": 0.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def run_roles(config: RLConfig) -> tuple[RequiredPasses, frozenset[str]]:
    """The passes over a batch that a run needs, and the roles that it starts."""
    dataflow = choose_dataflow(config.algorithm)
    needs = RequiredPasses.of(run_spec.effective_config(config), dataflow)
    return needs, needs.roles(dataflow) | run_spec.get_rollout_source(
        config.trainer.mode
    ).extra_roles


class RunModel(TypedDict):
    """A run's model, and how long its sequences are."""

    model_path: str
    lora: LoRAConfig
    dtype: str
    max_response_length: int
    max_model_len: int


def workload(config: RLConfig, **model: Unpack[RunModel]) -> planner.Workload:
    """One step of the run as sizes; raises ConfigError for a model that isn't a dense decoder."""
    needs, roles = run_roles(config)
    model_config, lora = text_config(model["model_path"]), model["lora"]
    response = model["max_response_length"]
    shape, kind = _shape(model_config), model_config.model_type
    actor, trainer, rollout = config.actor, config.trainer, config.rollout
    stored = _DTYPES[model["dtype"]]
    critic_parallel, started = config.critic.parallel, config.critic.model_path
    rows = choose_dataflow(config.algorithm).rows_an_update(config)
    mini = actor.ppo_mini_batch_size
    windows = getattr(model_config, "sliding_window", None)
    passes = int(needs.old_log_probs) + int(needs.reference) + int("teacher" in roles)
    full_kl = actor.use_kl_loss and actor.kl_loss_type == "full"
    engine = engine_capabilities(rollout)
    teachers = config.algorithm.teacher_models.values() if "teacher" in roles else ()
    critic_shape = _shape(text_config(started)) if started and "critic" in roles else None
    return planner.Workload(
        shape,
        trainer.train_batch_size,
        rollout.n,
        max(1, model["max_model_len"] - response),
        response,
        weight_bytes=stored,
        base_bytes=_BASE_BYTES[lora.quantize],
        compute_bytes=_DTYPES[actor.parallel.compute_dtype] or stored,
        adapters=_adapters(shape, lora),
        quantized=bool(lora.quantize),
        reference="reference" in roles and not lora.rank,
        teachers=tuple(_shape(text_config(path)) for path in teachers),
        critic=""
        if "critic" not in roles
        else Layout.of(critic_parallel)
        if critic_parallel
        else "as actor",
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
        samplers=run_spec.sampler_count(trainer),
        sampler_bytes=_DTYPES[rollout.dtype] or stored,
        families=kind in FAMILIES and not lora.rank,
        decodes_shards=kind in ROLLOUT_FAMILIES and not lora.rank,
        cuts_sequences=kind in FAMILIES and not lora.rank and not windows,
        runs_ahead=run_spec.get_rollout_source(trainer.mode).off_policy,
    )


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


def gpu_kinds(config: RLConfig) -> dict[str, Device]:
    """`trainer.gpu_kinds` as the planner has them."""
    return {n: gpu_of(n, **dict(kind)) for n, kind in config.trainer.gpu_kinds.items()}


def cluster_has_gpus(config: RLConfig) -> bool:
    """Whether the planner would find a GPU now."""
    return planner.read_cluster(gpu_kinds(config)).gpus > 0


def resolve_auto(
    config: RLConfig,
    *,
    cluster: Callable[[], planner.Cluster] | None = None,
    **model: Unpack[RunModel],
) -> RLConfig:
    """The settings with layout, budget and pools for the machines that are there now.

    Runs at each start, so that an attempt that finds other machines than the one before gets a
    layout for those, and resumes from its checkpoint. Settings that differ from their defaults are
    kept.

    Prints the choice and why. Settings with another placement come back as they are. Raises
    ConfigError for a model that the planner can't price, or settings that leave no layout, and
    PlacementError where none fits.
    """
    if config.trainer.placement != "auto":
        return config
    work = workload(config, **model)
    there = cluster() if cluster else planner.read_cluster(gpu_kinds(config))
    plan = plan_for(config, work, there, model["lora"])
    say(planner.explain(plan))
    chosen, (_, roles) = plan.chosen, run_roles(config)
    return apply_candidate(config, chosen.candidate, chosen.allocation, roles, chosen.work.ahead)


def plan_for(
    config: RLConfig, work: planner.Workload, cluster: planner.Cluster, lora: LoRAConfig
) -> planner.PlacementPlan:
    """Search the layouts that the settings leave open and the trainer accepts."""
    _, roles = run_roles(config)
    mode, nodes = config.trainer.mode, [machine.node for machine in cluster.machines]
    pools = config.trainer.pools
    trainer_gpus = next((pool.gpus for pool in pools if "actor" in pool.roles), 1.0)
    usable = cluster if trainer_gpus else cluster.without_gpus()
    apart = bool(usable.gpus and work.samplers and work.decodes)
    if apart and not pools and usable.gpus < 2:
        raise ConfigError(
            f"trainer.placement=auto with trainer.mode={mode} wants a GPU for the trainer "
            "and one for rollout, and there is one; set trainer.mode=sync"
        )
    cores = max(machine.cpus for machine in usable.machines)
    half = config.trainer.rollout_threads or max(1, int(cores) // 2)
    reserved_cpus = 0.0 if usable.gpus else float(work.samplers * half)

    def refuse(
        candidate: planner.Candidate, allocation: Allocation, ahead: planner.Samplers | None
    ) -> str:
        try:
            settings = apply_candidate(config, candidate, allocation, roles, ahead)
            check_layouts(settings, lora)
            _check_rows(settings, candidate)
            sized = [
                Pool(world_size=run_spec.pool_size(pool.roles, settings), **dict(pool))
                for pool in settings.trainer.pools
            ]
            require_capacity(sized, nodes)
        except EngineError as error:
            return str(error).splitlines()[0]
        return ""

    def plan(part: planner.Workload, machines: planner.Cluster) -> planner.PlacementPlan:
        return planner.search(
            part,
            machines,
            fixed_settings(config),
            lambda candidate, allocation: refuse(candidate, allocation, part.ahead),
            reserved_cpus,
        )

    if not apart or pools:
        return plan(work, usable)
    plan_apart = planner.search_apart(work, usable, plan, *_sampler_choices(config, usable))
    return replace(plan_apart, cluster=usable, together=_together(config, work, usable))


def _sampler_choices(config: RLConfig, cluster: planner.Cluster) -> tuple[list[int], list[int]]:
    """The numbers of processes that only decode which the settings allow, and of their GPUs."""
    rollout, workers = config.rollout, config.trainer.rollout_workers
    tp, largest = rollout.tensor_parallel_size, max(machine.gpus for machine in cluster.machines)
    several = "vllm" in engine_capabilities(rollout).settings  # a sampler takes several GPUs
    sizes = [n for n in range(1, largest + 1) if largest % n == 0] if several else [1]
    return [workers] if workers > 1 else [], [tp] if tp > 1 else sizes


def _together(config: RLConfig, work: planner.Workload, cluster: planner.Cluster) -> float | None:
    """Seconds of a step whose rollout and update take turns on all GPUs; None where none fits."""
    turns = replace(work, runs_ahead=False, samplers=0)
    try:
        return planner.search(turns, cluster, fixed_settings(config)).chosen.price.total
    except EngineError:
        return None


def apply_candidate(
    config: RLConfig,
    candidate: planner.Candidate,
    allocation: Allocation,
    roles: Collection[str],
    ahead: planner.Samplers | None = None,
) -> RLConfig:
    """The settings with a candidate's layout and budget, and the samplers, placed on Ray."""
    changes: dict[str, object] = {axis: getattr(candidate.layout, axis) for axis in AXES}
    changes |= {name: getattr(candidate, name) for name in _MEMORY_OPTIONS}
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
    if not run_spec.sampler_count(config.trainer):
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


def fixed_settings(config: RLConfig) -> planner.FixedSettings:
    """The settings that the user has changed from their defaults, which the planner keeps."""
    candidate, unset = _candidate(config), ParallelConfig()
    axes = {axis: getattr(config.actor.parallel, axis) for axis in AXES}
    tokens_are_default = _if_default(config.actor, {"max_tokens_per_micro_batch": 0})
    return planner.FixedSettings(
        axes={axis: size for axis, size in axes.items() if size != getattr(unset, axis)},
        rollout_tp=candidate.rollout_tp if candidate.rollout_tp > 1 else None,
        tokens=None if tokens_are_default else candidate.tokens,
        offload_params=candidate.offload_params,
        offload_optimizer=candidate.offload_optimizer,
        activation_checkpointing=candidate.activation_checkpointing,
        sequence_parallel=candidate.sequence_parallel,
    )


def _if_default(section: BaseModel, values: Mapping[str, object]) -> dict[str, object]:
    """Those of `values` whose setting has its default in `section`."""
    fields = type(section).model_fields
    return {k: v for k, v in values.items() if getattr(section, k) == fields[k].default}


def _pools(
    config: RLConfig, allocation: Allocation, roles: Collection[str], ahead: planner.Samplers | None
) -> tuple[PoolConfig, ...]:
    """A pool for the policy's roles, and one for each other role; of several samplers, of each."""
    cpus = allocation.cpus
    if config.trainer.threads:
        cpus = min(cpus, max(1.0, config.trainer.threads // allocation.per_machine))
    policy, *others = run_spec.default_pools(roles)
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
    samplers = max(1, run_spec.sampler_count(config.trainer))
    return max(
        1, int(allocation.cpus) if allocation.gpus else int(allocation.reserved_cpus) // samplers
    )


def _check_rows(config: RLConfig, candidate: planner.Candidate) -> None:
    """Raise ConfigError if a data-parallel rank would have no rows of some mini-batch."""
    layout = candidate.layout
    learned = choose_dataflow(config.algorithm).rows_an_update(config)
    completions = config.trainer.train_batch_size * config.rollout.n
    for rows, size in (
        (learned, config.actor.ppo_mini_batch_size),
        (completions, config.critic.ppo_mini_batch_size),
    ):
        count = -(-rows // size) if size else 1
        if rows // layout.data_ranks < count:
            raise ConfigError(
                f"{rows} completions on {layout.data_ranks} data-parallel ranks are too few for "
                f"{count} mini-batches; raise ppo_mini_batch_size"
            )


def _candidate(config: RLConfig) -> planner.Candidate:
    """The layout and the budget that the settings have."""
    parallel, tp = config.actor.parallel, config.rollout.tensor_parallel_size
    options = {name: getattr(parallel, name) for name in (*_MEMORY_OPTIONS, "sequence_parallel")}
    tokens = config.actor.max_tokens_per_micro_batch
    return planner.Candidate(Layout.of(parallel), tp, tokens, **options)


_RECOMPUTE, _OFFLOAD = {"activation_checkpointing": True}, {"offload_optimizer": True}


def check_rl_memory(config: RLConfig, cluster: planner.Cluster, **model: Unpack[RunModel]) -> None:
    """Raise PlacementError where a GPU of `cluster` can't hold what a rank of the run keeps.

    Refused is only what is certain not to fit, however few tokens a micro-batch has: weights,
    gradients, moments, and rollout's copy. The error names a layout that would fit. Models that the
    planner can't price are let through.
    """
    try:
        work = workload(config, **model)
    except ConfigError:
        return
    if config.trainer.placement == "auto":
        plan_for(config, work, cluster, model["lora"])
        return
    parallel = config.actor.parallel
    candidate = _candidate(config)
    memory, there = estimate(work, candidate, gpu=True), _gpu_memory(cluster)
    need = _trained(memory) + memory.rollout
    if need <= there:
        return
    unset = ParallelConfig(compute_dtype=parallel.compute_dtype)
    actor = config.actor.model_copy(update={"parallel": unset})
    trainer = config.trainer.model_copy(update={"placement": "auto", "pools": ()})
    free = config.model_copy(update={"actor": actor, "trainer": trainer})
    try:
        fitting = plan_for(free, work, cluster, model["lora"]).chosen.candidate
        instead = f"rl.actor.parallel {fitting.layout}"
        if fitting.memory_options != "-":
            instead += f" ({fitting.memory_options})"
        instead += f", rollout.tensor_parallel_size {fitting.rollout_tp} would"
    except EngineError:
        instead = f"no layout of {cluster} would: take more machines, or set model.lora.rank"
    raise PlacementError(
        f"rl can't fit: with rl.actor.parallel {candidate.layout} a GPU keeps {need / GIB:.0f} GiB "
        f"of weights, gradients, moments and rollout copy, and has {there / GIB:.0f}; {instead}"
    )


def check_sft_memory(
    config: SFTConfig, cluster: planner.Cluster, **model: Unpack[RunModel]
) -> None:
    """Raise PlacementError where a GPU of `cluster` can't hold what a rank of the warm start keeps.

    The error names a layout that would fit. Models that the planner can't price are let through.
    """
    try:
        work = sft_workload(config, **model)
    except ConfigError:
        return
    need, there = _trained(sft_memory(work, config.parallel)), _gpu_memory(cluster)
    if need <= there:
        return
    tried, room = _sharded(config.parallel, cluster.gpus), usable_bytes(there)
    fitting = (candidate for candidate in tried if sft_memory(work, candidate).peak <= room)
    instead = next(map(_named, fitting), f"no fsdp layout of {cluster.gpus} GPUs")
    raise PlacementError(
        f"sft can't fit: with sft.parallel {Layout.of(config.parallel)} a GPU keeps "
        f"{need / GIB:.0f} GiB of weights, gradients and moments, and has {there / GIB:.0f}; "
        f"{instead} would; or set model.lora.rank to train adapters, or sft.skip to begin RL with "
        "the model as it is"
    )


def sft_workload(config: SFTConfig, **model: Unpack[RunModel]) -> planner.Workload:
    """One step of the warm start as sizes; raises ConfigError as `workload` does."""
    rl = RLConfig.model_validate({"actor": {"parallel": config.parallel}})
    work = workload(rl, **model)
    rows = config.train_batch_size
    return replace(work, prompts=rows, completions=1, decodes=False, reference=False)


def sft_memory(work: planner.Workload, parallel: ParallelConfig, tokens: int = 1) -> Memory:
    """What a rank needs for micro-batches of so many tokens; nothing is kept for rollout."""
    options = {name: getattr(parallel, name) for name in _MEMORY_OPTIONS}
    candidate = planner.Candidate(Layout.of(parallel), tokens=tokens, **options)
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


def _gpu_memory(cluster: planner.Cluster) -> int:
    """Bytes of the smallest GPU."""
    return min(machine.gpu_memory for machine in cluster.machines if machine.gpus)


_HOST_GIB = 128  # of a machine's memory, a GPU; where it is not known


@dataclass(frozen=True, slots=True)
class Machines:
    """What the ranks would compute on."""

    ranks: int
    per_machine: int
    accelerator: str = ""  # by Ray's name, e.g. "H100"; empty: CPU cores of this machine


def step_estimate(config: RLConfig, work: planner.Workload, machines: Machines) -> list[str]:
    """Lines about a rank's memory and a step's seconds."""
    priced = PricedCandidate(work, _candidate(config), _allocation(machines))
    memory, price, there = priced.memory, priced.price, priced.allocation.memory
    names = ("weights", "gradients", "moments", "activations", "rollout", "cache")
    sizes = {name.replace("rollout", "rollout copy"): getattr(memory, name) for name in names}
    large = {name: size / GIB for name, size in sizes.items() if size >= GIB / 100}
    shown = ", ".join(f"{name} {size:.2f}" for name, size in large.items())
    fits = "fits" if priced.fits else f"does not fit: {priced.lacks} needs more"
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
