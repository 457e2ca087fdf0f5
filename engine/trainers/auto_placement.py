"""`trainer.placement: auto`: layout, batch budget and pools for the machines of a Ray cluster.

The one caller of `engine.planner` in training. Also: whether a run's models fit, what a step would
take, and the dtype of the models.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from engine import planner
from engine.config import LoRAConfig, ParallelConfig, PoolConfig, RLConfig, RolloutConfig, SFTConfig
from engine.config.data import AdapterConfig
from engine.config.training import OfflineConfig
from engine.console import say
from engine.controller.placement import Pool, require_capacity
from engine.dataflows import choose_dataflow
from engine.errors import ConfigError, EngineError, PlacementError, first_line
from engine.kernels import liger
from engine.models import MIXTURES, resolve_dtype, text_config
from engine.parallel.decoder_plan import FAMILIES
from engine.parallel.layout import AXES, Experts, Layout, ModelShape
from engine.parallel.shard_maps import ROLLOUT_FAMILIES
from engine.planner.explain import options_text, peak_parts, rank_gib, seconds_text
from engine.planner.layout_search import BUDGET, PricedCandidate
from engine.planner.memory import Memory, estimate
from engine.planner.resources import GIB, Allocation, Device, cpu, gpu, gpu_of, gpu_of_product
from engine.rollout.protocol import engine_capabilities
from engine.trainers import run_spec
from engine.trainers.layout_checks import check_layouts

_BASE_BYTES = {"": 0.0, "nf4": 0.52, "int8": 1.0}  # an element of a quantised base
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_DTYPES = {"": 0.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def workload(
    config: RLConfig,
    *,
    model_path: str,
    lora: LoRAConfig,
    dtype: str,
    max_response_length: int,
    max_model_len: int,
) -> planner.Workload:
    """One step of the run as sizes; raises ConfigError for a model that isn't a dense decoder."""
    needs, roles = run_spec.run_roles(config)
    model_config = text_config(model_path)
    shape, kind = _shape(model_config), model_config.model_type
    actor, trainer, rollout = config.actor, config.trainer, config.rollout
    stored, engine = _DTYPES[dtype], engine_capabilities(rollout)
    rows = choose_dataflow(config.algorithm).rows_an_update(config)
    mini = actor.ppo_mini_batch_size
    in_family = kind in FAMILIES and not lora.rank
    teachers = config.algorithm.teacher_models.values() if "teacher" in roles else ()
    critic: Layout | str = ""
    critic_shape = None
    if "critic" in roles:
        parallel, path = config.critic.parallel, config.critic.model_path
        critic = Layout.of(parallel) if parallel else "as actor"
        critic_shape = _shape(text_config(path)) if path else None
    return planner.Workload(
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
        moves_reference=config.reference.offload_params,
        teachers=tuple(_shape(text_config(path)) for path in teachers),
        critic=critic,
        critic_shape=critic_shape,
        critic_adapters=_adapters(critic_shape or shape, config.critic.lora),
        actor_epochs=actor.ppo_epochs,
        critic_epochs=config.critic.ppo_epochs,
        updates=-(-rows // mini) if mini else 1,
        passes=_plain_passes(config),
        full_kl=needs.ref_kl or (actor.use_kl_loss and actor.kl_loss_type == "full"),
        decodes=not engine.remote,
        decode_rows=rollout.max_num_seqs,
        kv_cache=(rollout.kv_cache_memory_mb or 0) << 20,
        memory_share=engine.memory_share,
        stays_awake=engine.stays_awake,
        sleeps=engine.loads_shards and not engine.stays_awake,
        shares_base=_shares_base(config.rollout, lora, kind, dtype),
        fused=kind in ROLLOUT_FAMILIES and torch.cuda.is_available() and liger.is_installed(),
        samplers=run_spec.sampler_count(trainer),
        sampler_bytes=_DTYPES[rollout.dtype] or stored,
        families=in_family,
        decodes_shards=(kind in ROLLOUT_FAMILIES or engine.loads_shards)
        and not (lora.rank or engine.own_processes),
        cuts_sequences=in_family and not getattr(model_config, "sliding_window", None),
        runs_ahead=run_spec.rollout_source(trainer).off_policy,
    )


def _plain_passes(config: RLConfig) -> int:
    """Passes of a step without gradients; modes that run ahead have one more for log-probs."""
    needs, roles = run_spec.run_roles(config)
    return sum((needs.old_log_probs, needs.reference, "teacher" in roles))


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
        raise error.with_message(
            f"trainer.placement=auto can't price this model: {error}, and trainer.placement=ray"
        ) from error


def _shares_base(rollout: RolloutConfig, lora: LoRAConfig, kind: str, dtype: str) -> bool | None:
    """Whether rollout decodes adapters beside the trainer's base; None: where that pays."""
    if not lora.rank or rollout.lora == "merged" or rollout.tensor_parallel_size > 1:
        return False
    if rollout.engine == "vllm":
        vllm, named = rollout.vllm, lora.target_modules
        known = isinstance(named, str) or {*_ATTENTION, *_MLP}.issuperset(named)
        shared = vllm.in_process and (vllm.dtype or dtype) == dtype
        if not (known and shared and kind in ROLLOUT_FAMILIES) or lora.quantize:
            return False
    elif rollout.engine != "native":
        return False
    return True if rollout.lora else None


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
    return {n: gpu_of(n, **dict(kind)) for n, kind in config.trainer.gpu_kinds.items()}


def cluster_has_gpus(config: RLConfig) -> bool:
    return planner.read_cluster(gpu_kinds(config)).gpus > 0


def resolve_auto(config: RLConfig, lora: LoRAConfig, **model: Any) -> RLConfig:
    """The settings with layout, budget and pools for the machines that are there now.

    Runs at each start. Settings that differ from their defaults are kept, and those with another
    placement come back as they are. Prints the choice and why. `model` is as in `workload`. Raises
    ConfigError for a model that the planner can't price, or settings that leave no layout, and
    PlacementError where none fits.
    """
    if config.trainer.placement != "auto":
        return _fit_memory(config, lora, **model)
    work = workload(config, lora=lora, **model)
    plan = plan_for(config, work, planner.read_cluster(gpu_kinds(config)), lora)
    say(planner.explain(plan))
    chosen, (_, roles) = plan.chosen, run_spec.run_roles(config)
    config = _with_memory(config, chosen, roles)
    return apply_candidate(config, chosen.candidate, chosen.allocation, roles, chosen.work.ahead)


def _fit_memory(config: RLConfig, lora: LoRAConfig, **model: Any) -> RLConfig:
    """Choose what the layout leaves open of a GPU's memory, where there is one to be priced."""
    kind, memory = _card(config)
    if not memory:
        return config
    try:
        work = workload(config, lora=lora, **model)
    except ConfigError:
        return config
    candidate, fixed = rl_candidate(config), fixed_settings(config)
    ranks = candidate.layout.world_size
    allocation = _allocation(ranks, min(ranks, torch.cuda.device_count() or ranks), kind, memory)
    chosen = planner.fitted(work, candidate, allocation, fixed)
    if chosen is None:
        return config
    say(planner.explain_memory(chosen, PricedCandidate(work, candidate, allocation)))
    return _with_memory(config, chosen, run_spec.run_roles(config)[1])


def _card(config: RLConfig) -> tuple[str, int]:
    """Kind and bytes of the GPU that a rank of the actor has; 0 bytes without one."""
    on_ray = config.trainer.placement == "ray"
    if on_ray and not any(p.gpus for p in config.trainer.pools if "actor" in p.roles):
        return "", 0
    if torch.cuda.is_available():
        return local_gpu(), torch.cuda.get_device_properties(0).total_memory
    machines = planner.read_cluster(gpu_kinds(config)).machines if on_ray else ()
    sizes = [(m.gpu_memory, m.accelerator) for m in machines if m.gpus]
    return min(sizes)[::-1] if sizes else ("", 0)


def _with_memory(config: RLConfig, chosen: PricedCandidate, roles: Collection[str]) -> RLConfig:
    """The settings with what a plan keeps, computes again and offloads, and rollout's memory."""
    candidate, work, changes = chosen.candidate, chosen.work, dict[str, object]()
    for name in ("offload_policy", "offload_optimizer"):
        changes[f"actor.parallel.{name}"] = getattr(candidate, name)
    for role in ("actor", "critic") if "critic" in roles else ("actor",):
        section = getattr(config, role)
        if section.max_tokens_per_micro_batch == BUDGET:
            changes[f"{role}.max_tokens_per_micro_batch"] = candidate.tokens
        own = section.parallel and section.parallel.activation_checkpointing is None
        if own and (checkpointing := candidate.activation_checkpointing):
            changes[f"{role}.parallel.activation_checkpointing"] = checkpointing
    if chosen.rollout_memory and chosen.allocation.gpus and not work.kv_cache:
        share, rows = work.memory_share, work.decode_rows
        setting = "vllm.gpu_memory_utilization" if share else "max_num_seqs"
        changes[f"rollout.{setting}"] = share or rows
    ahead = work.runs_ahead and chosen.allocation.gpus  # samplers have one base, too
    if not config.rollout.lora and (work.shares_base or (work.shares_base is None and ahead)):
        changes["rollout.lora"] = "adapter"
    return config.replaced(changes)


def plan_for(
    config: RLConfig, work: planner.Workload, cluster: planner.Cluster, lora: LoRAConfig
) -> planner.PlacementPlan:
    """Search the layouts that the settings leave open and the trainer accepts."""
    _, roles = run_spec.run_roles(config)
    pools, nodes = config.trainer.pools, [machine.node for machine in cluster.machines]
    trainer_gpus = next((pool.gpus for pool in pools if "actor" in pool.roles), 1.0)
    usable = cluster if trainer_gpus else cluster.without_gpus()
    apart = bool(usable.gpus and work.samplers and work.decodes)
    if apart and not pools and usable.gpus < 2:
        raise ConfigError(
            f"trainer.placement=auto with trainer.mode={config.trainer.mode} needs a GPU for the "
            "trainer and one for rollout, and there is one; set trainer.mode=sync"
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
            return first_line(error)
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
    rollout, workers = config.rollout, config.trainer.rollout_workers
    tp, largest = rollout.tensor_parallel_size, max(machine.gpus for machine in usable.machines)
    several = "vllm" in engine_capabilities(rollout).settings  # a sampler takes several GPUs
    sizes = [n for n in range(1, largest + 1) if largest % n == 0] if several else [1]
    counts = [workers] if workers > 1 else []
    plan_apart = planner.search_apart(work, usable, plan, counts, [tp] if tp > 1 else sizes)
    try:  # rollout and update taking turns on all GPUs, to compare with
        passes = _plain_passes(config.replaced({"trainer.mode": "sync"}))
        turns = replace(work, runs_ahead=False, samplers=0, passes=passes)
        together = planner.search(turns, usable, fixed_settings(config)).chosen.price.total
    except EngineError:
        together = None
    return replace(plan_apart, cluster=usable, together=together)


def apply_candidate(
    config: RLConfig,
    candidate: planner.Candidate,
    allocation: Allocation,
    roles: Collection[str],
    ahead: planner.Samplers | None = None,
) -> RLConfig:
    """The settings with a candidate's layout, and the samplers, placed on Ray."""
    sizes, trainer = candidate.layout.sizes, config.trainer
    changes: dict[str, object] = {f"actor.parallel.{axis}": size for axis, size in sizes.items()}
    if run_spec.sampler_count(trainer):
        changes["trainer.rollout_threads"] = _sampler_threads(config, allocation)
    else:
        changes["rollout.tensor_parallel_size"] = candidate.rollout_tp
    if ahead is not None:
        changes["trainer.rollout_workers"] = ahead.count
        changes["rollout.tensor_parallel_size"] = ahead.tp
        if ahead.tp > 1:
            changes["rollout.vllm.in_process"] = False
    pools = trainer.pools or _pools(config, allocation, roles, ahead)
    return config.replaced(changes | {"trainer.placement": "ray", "trainer.pools": pools})


def fixed_settings(config: RLConfig) -> planner.FixedSettings:
    """The settings that the user has changed from their defaults, which the planner keeps."""
    candidate, parallel = rl_candidate(config), config.actor.parallel
    axes = {axis: getattr(parallel, axis) for axis in AXES}
    rollout, defaults = config.rollout, type(config.rollout)()
    return planner.FixedSettings(
        axes={axis: size for axis, size in axes.items() if size != getattr(ParallelConfig(), axis)},
        rollout_tp=candidate.rollout_tp if candidate.rollout_tp > 1 else None,
        tokens=None if candidate.tokens == BUDGET else candidate.tokens,
        options=candidate,
        activation_checkpointing=parallel.activation_checkpointing,
        rollout_memory=rollout.max_num_seqs != defaults.max_num_seqs
        or rollout.vllm.gpu_memory_utilization != defaults.vllm.gpu_memory_utilization,
    )


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
        threads, gpus = _sampler_threads(config, allocation), ahead.tp if ahead is not None else 0
        pools.append(PoolConfig(roles=("sampler",), cpus=float(threads), gpus=float(gpus)))
    return tuple(pools)


def _sampler_threads(config: RLConfig, allocation: Allocation) -> int:
    """CPU threads of a sampler: a rank's cores on a GPU, else half of its machine's."""
    if config.trainer.rollout_threads:
        return config.trainer.rollout_threads
    samplers = max(1, run_spec.sampler_count(config.trainer))
    shared = int(allocation.reserved_cpus) // samplers
    return max(1, int(allocation.cpus) if allocation.gpus else shared)


def _check_rows(config: RLConfig, candidate: planner.Candidate) -> None:
    """Raise ConfigError if a data-parallel rank would have no rows of some mini-batch."""
    ranks = candidate.layout.data_ranks
    learned = choose_dataflow(config.algorithm).rows_an_update(config)
    completions = config.trainer.train_batch_size * config.rollout.n
    for rows, section in ((learned, config.actor), (completions, config.critic)):
        count = -(-rows // (section.ppo_mini_batch_size or rows))
        if rows // ranks < count:
            raise ConfigError(
                f"{rows} completions on {ranks} data-parallel ranks are too few for {count} "
                "mini-batches; raise ppo_mini_batch_size"
            )


def rl_candidate(config: RLConfig) -> planner.Candidate:
    """The layout that the settings say."""
    candidate = sft_candidate(config.actor.parallel, config.actor.max_tokens_per_micro_batch)
    return replace(candidate, rollout_tp=config.rollout.tensor_parallel_size)


def check_rl_memory(
    config: RLConfig, cluster: planner.Cluster, lora: LoRAConfig, **model: Any
) -> None:
    """Raise PlacementError where a GPU of `cluster` can't hold what a rank of the run keeps.

    Refused is only what is certain not to fit: weights, gradients, moments, and rollout's copy. The
    error names a layout that would. Models that the planner can't price are let through.
    """
    try:
        work = workload(config, lora=lora, **model)
    except ConfigError:
        return
    if config.trainer.placement == "auto":
        plan_for(config, work, cluster, lora)
        return
    candidate = rl_candidate(config)
    memory, available = estimate(work, candidate, gpu=True), _gpu_memory(cluster)
    need = _trained(memory) + memory.awake
    if need <= available:
        return
    unset = ParallelConfig(compute_dtype=config.actor.parallel.compute_dtype)
    auto = {"trainer.placement": "auto", "trainer.pools": ()}
    free = config.replaced({"actor.parallel": unset, **auto})
    instead = _fitting("rl.actor", lambda: plan_for(free, work, cluster, lora))
    raise PlacementError(
        f"rl can't fit: with rl.actor.parallel {candidate.layout} a GPU keeps {need / GIB:.0f} GiB "
        f"of weights, gradients, moments and rollout copy, and has {available / GIB:.0f}; {instead}"
    )


def check_sft_memory(config: SFTConfig, cluster: planner.Cluster, **model: Any) -> None:
    """Do as `check_rl_memory`, for the warm start."""
    try:
        work = sft_workload(config, **model)
    except ConfigError:
        return
    need, available = _trained(sft_memory(work, config.parallel)), _gpu_memory(cluster)
    if need <= available:
        return
    axes = {"pp": 1, "sp": 1, "tp": 1}
    fixed = planner.FixedSettings(axes, tokens=config.max_tokens_per_micro_batch)
    instead = _fitting("sft", lambda: planner.search(work, cluster, fixed))
    raise PlacementError(
        f"sft can't fit: with sft.parallel {Layout.of(config.parallel)} a GPU keeps "
        f"{need / GIB:.0f} GiB of weights, gradients and moments, and has {available / GIB:.0f}; "
        f"{instead}; or set model.lora.rank to train adapters, or sft.skip to begin RL with the "
        "model as it is"
    )


def _fitting(section: str, plan: Callable[[], planner.PlacementPlan]) -> str:
    """Say which layout would fit, if any."""
    try:
        chosen = plan().chosen
    except EngineError:
        return "no layout of these machines would"
    candidate, rollout = chosen.candidate, ""
    options = f" ({candidate.memory_options})" if candidate.memory_options else ""
    if chosen.rollout_memory:
        rollout = f", rollout.tensor_parallel_size {candidate.rollout_tp}"
    return f"{section}.parallel {candidate.layout}{options}{rollout} would"


def sft_workload(config: OfflineConfig, **model: Any) -> planner.Workload:
    """One step of training on rows as sizes; raises ConfigError as `workload` does."""
    rl = RLConfig.model_validate({"actor": {"parallel": config.parallel}})
    work = workload(rl, **model)
    rows = config.train_batch_size
    step = replace(work, prompts=rows, completions=1, passes=0, reference=False)
    return replace(step, decodes=False, runs_ahead=True)  # no copy for rollout


def sft_candidate(parallel: ParallelConfig, tokens: int = 1) -> planner.Candidate:
    """The layout of training on rows, in micro-batches of so many tokens."""
    names = (f.name for f in fields(planner.Candidate) if f.name in ParallelConfig.model_fields)
    options: dict[str, Any] = {name: getattr(parallel, name) or False for name in names}
    return planner.Candidate(Layout.of(parallel), tokens=tokens, **options)


def sft_memory(work: planner.Workload, parallel: ParallelConfig, tokens: int = 1) -> Memory:
    """What a rank needs for micro-batches of so many tokens."""
    return estimate(work, sft_candidate(parallel, tokens), gpu=True)


def _trained(memory: Memory) -> float:
    return memory.weights + memory.gradients + memory.moments


def _gpu_memory(cluster: planner.Cluster) -> int:
    return min(machine.gpu_memory for machine in cluster.machines if machine.gpus)


def step_estimate(
    work: planner.Workload,
    candidate: planner.Candidate,
    ranks: int,
    per_machine: int,
    accelerator: str,
    fixed: planner.FixedSettings | None = None,
) -> tuple[float, list[str]]:
    """Seconds of a step of `work` on GPUs (`accelerator`) or this CPU, and lines about it.

    `fixed`: what the settings leave open beyond that a run on GPUs chooses, as here.
    """
    allocation = _allocation(ranks, per_machine, accelerator)
    priced, memory = PricedCandidate(work, candidate, allocation), allocation.memory
    if fixed is not None and accelerator:
        priced = planner.fitted(work, candidate, allocation, fixed) or priced
    needed, price, decoding = priced.memory, priced.price, priced.price.rollout + priced.price.ahead
    verdict = "fits" if priced.fits else f"does not fit: {priced.lacks} needs more"
    lines = [
        f"memory    {rank_gib(priced):.2f} of {memory / GIB:.1f} GiB a rank at most, in "
        f"{needed.when}; {verdict}",
        f"          {peak_parts(priced)}; {options_text(priced)}",
        f"time      {seconds_text(price.total)} s a step, roughly: training "
        f"{seconds_text(price.compute)}, between ranks {seconds_text(price.traffic + price.switch)}"
        + (f", rollout {seconds_text(decoding)}" if work.decodes else ""),
    ]
    return price.total, lines


def _allocation(ranks: int, per_machine: int, accelerator: str, memory: int = 0) -> Allocation:
    """So many ranks on GPUs of a kind, of `memory` bytes or the kind's; without one on this CPU."""
    if accelerator:
        kind = gpu(accelerator)
        memory = memory or int((kind.memory_gib or 80) * GIB)
        host = int(128 * GIB)  # not known
        return Allocation(ranks, per_machine, 1.0, memory, host, kind, 1.0)
    cores = max(1.0, (os.cpu_count() or 1) / per_machine)
    memory = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_machine)
    return Allocation(ranks, per_machine, cores, memory, memory, cpu(cores))


def local_gpu() -> str:
    """The kind of this machine's first GPU, as the planner knows it; empty without one."""
    if not torch.cuda.is_available():
        return ""
    memory = torch.cuda.get_device_properties(0).total_memory
    return gpu_of_product(torch.cuda.get_device_name(0), memory).name


def model_dtype(dtype: str, model_path: str | Path, config: RLConfig) -> str:
    """The dtype of the models, `auto` resolved for where they will be; see `resolve_dtype`."""
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
