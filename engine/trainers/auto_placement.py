"""`trainer.placement: auto`: layout, batch budget and pools for the machines of a Ray cluster.

Runs at each start, so that an attempt that finds fewer or more machines than the one before gets a
layout for those and resumes from its checkpoint (layouts and budgets may differ between attempts).
Settings that differ from their defaults are kept. `engine.planner` prices the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from pydantic import BaseModel
from transformers import PretrainedConfig

from engine.config import LoRAConfig, ParallelConfig, PoolConfig, RLConfig
from engine.console import say
from engine.controller.launch import Pool
from engine.controller.placement import require_capacity
from engine.dataflows import choose_dataflow
from engine.dataflows.required_passes import RequiredPasses
from engine.errors import ConfigError, EngineError
from engine.models import text_config
from engine.parallel.layout import AXES, Layout, ModelShape
from engine.parallel.tensor_parallel import FAMILIES
from engine.planner import (
    Candidate,
    Cluster,
    FixedSettings,
    PlacementPlan,
    Workload,
    explain,
    read_cluster,
    search,
)
from engine.planner.resources import Allocation
from engine.rollout.protocol import engine_capabilities
from engine.trainers.layouts import check_layouts, pool_size
from engine.trainers.rl_setup import default_pools
from engine.trainers.rollout_sources import get_rollout_source, sampler_count

_BASE_BYTES = {"": 0.0, "nf4": 0.52, "int8": 1.0}  # an element of a quantised base
_DTYPES = {"": 0.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def cluster_has_gpus() -> bool:
    """Whether the planner would find a GPU now."""
    return read_cluster().gpus > 0


def resolve_auto(
    config: RLConfig,
    roles: Collection[str],
    needs: RequiredPasses,
    *,
    model_path: str,
    lora: LoRAConfig,
    dtype: str,
    max_response_length: int,
    max_model_len: int,
    cluster: Callable[[], Cluster] | None = None,
) -> RLConfig:
    """The settings with layout, budget and pools for the machines that are there now.

    `roles` are those that the run starts. Prints the choice and why. Settings with another
    placement come back as they are. Raises ConfigError for a model that the planner can't price,
    or settings that leave no layout, and PlacementError where none fits.
    """
    if config.trainer.placement != "auto":
        return config
    work = workload(
        config,
        roles,
        needs,
        text_config(model_path),
        lora=lora,
        dtype=dtype,
        max_response_length=max_response_length,
        max_model_len=max_model_len,
    )
    plan = plan_for(config, work, roles, (cluster or read_cluster)(), lora)
    say(explain(plan))
    return apply_candidate(config, plan.chosen.candidate, plan.chosen.allocation, roles)


def plan_for(
    config: RLConfig, work: Workload, roles: Collection[str], cluster: Cluster, lora: LoRAConfig
) -> PlacementPlan:
    """Search the layouts that the settings leave open and the trainer accepts."""
    mode, nodes = config.trainer.mode, [machine.node for machine in cluster.machines]
    pools = config.trainer.pools
    wanted = next((pool.gpus for pool in pools if "actor" in pool.roles), 1.0)
    usable = cluster if wanted else cluster.without_gpus()
    if usable.gpus and mode == "async":
        raise ConfigError(
            "trainer.placement=auto with trainer.mode=async on GPUs: processes of asynchronous "
            "rollout take CPU cores; set trainer.mode=one_step_off, or trainer.placement=ray"
        )
    if usable.gpus and "sampler" in roles and not pools:
        if usable.gpus < 2:
            raise ConfigError(
                f"trainer.placement=auto with trainer.mode={mode} wants a GPU for the trainer "
                "and one for rollout, and there is one; set trainer.mode=sync"
            )
        usable = usable.less_gpus(1)
    half = config.trainer.rollout_threads or max(1, int(_cores(usable)) // 2)
    reserved_cpus = 0.0 if usable.gpus else float(work.samplers * half)

    def refusal(candidate: Candidate, allocation: Allocation) -> str:
        try:
            settings = apply_candidate(config, candidate, allocation, roles)
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

    return search(work, usable, fixed_settings(config), refusal, reserved_cpus)


def apply_candidate(
    config: RLConfig, candidate: Candidate, allocation: Allocation, roles: Collection[str]
) -> RLConfig:
    """The settings with a candidate's layout and budget, placed on Ray."""
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
    placed["pools"] = config.trainer.pools or _pools(config, allocation, roles)
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


def workload(
    config: RLConfig,
    roles: Collection[str],
    needs: RequiredPasses,
    model_config: PretrainedConfig,
    *,
    lora: LoRAConfig,
    dtype: str,
    max_response_length: int,
    max_model_len: int,
) -> Workload:
    """One step of the run as sizes; raises ConfigError for a model that isn't a dense decoder."""
    shape, kind = _shape(model_config), model_config.model_type
    actor, trainer, rollout = config.actor, config.trainer, config.rollout
    stored = _DTYPES[dtype]
    own = config.critic.parallel
    rows = choose_dataflow(config.algorithm).rows_an_update(config)
    mini = actor.ppo_mini_batch_size
    windows = getattr(model_config, "sliding_window", None)
    passes = int(needs.old_log_probs) + int(needs.reference) + int("teacher" in roles)
    full_kl = actor.use_kl_loss and actor.kl_loss_type == "full"
    engine = engine_capabilities(rollout)
    teacher = config.algorithm.teacher
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
        teacher=_shape(text_config(teacher)) if "teacher" in roles else None,
        critic="" if "critic" not in roles else Layout.of(own) if own else "as actor",
        actor_epochs=actor.ppo_epochs,
        critic_epochs=config.critic.ppo_epochs,
        updates=-(-rows // mini) if mini else 1,
        passes=passes,
        full_kl=full_kl or needs.ref_kl,
        decodes=not engine.remote,
        decode_rows=rollout.max_num_seqs,
        kv_cache=rollout.kv_cache_memory_mb << 20 if "kv_cache_memory_mb" in engine.settings else 0,
        samplers=sampler_count(trainer),
        sampler_bytes=_DTYPES[rollout.dtype] or stored,
        families=kind in FAMILIES and not lora.rank,
        cuts_sequences=kind in FAMILIES and not lora.rank and not windows,
        runs_ahead=get_rollout_source(trainer.mode).off_policy,
    )


def _shape(model_config: PretrainedConfig) -> ModelShape:
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(model_config, name, None):
            raise ConfigError(
                f"trainer.placement=auto can't price a mixture of experts (model type "
                f"{model_config.model_type!r}); set actor.parallel, and trainer.placement=ray"
            )
    try:
        return ModelShape.of(model_config)
    except ConfigError as error:
        raise ConfigError(
            f"trainer.placement=auto can't price this model: {error}, and trainer.placement=ray"
        ) from error


def _adapters(shape: ModelShape, lora: LoRAConfig) -> int:
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
    chosen = sides.values() if isinstance(named, str) else [sides.get(n, 0) for n in named]
    return shape.layers * lora.rank * sum(chosen)


def _if_default(section: BaseModel, values: Mapping[str, object]) -> dict[str, object]:
    """Those of `values` whose setting has its default in `section`."""
    fields = type(section).model_fields
    return {k: v for k, v in values.items() if getattr(section, k) == fields[k].default}


def _pools(
    config: RLConfig, allocation: Allocation, roles: Collection[str]
) -> tuple[PoolConfig, ...]:
    """A pool for the policy's roles, and one for each other role."""
    cpus = allocation.cpus
    if config.trainer.threads:
        cpus = min(cpus, max(1.0, config.trainer.threads // allocation.per_machine))
    policy, *others = default_pools(roles)
    pools = [PoolConfig(roles=policy, cpus=cpus, gpus=allocation.gpus)]
    pools += [PoolConfig(roles=role, cpus=0.0) for role in others]
    if "sampler" in roles:
        threads = float(_sampler_threads(config, allocation))
        pools.append(PoolConfig(roles=("sampler",), cpus=threads, gpus=allocation.gpus))
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
