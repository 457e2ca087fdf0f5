"""One RL step of a run as the planner's sizes: for `auto` placement, and for the memory check."""

from __future__ import annotations

from transformers import PretrainedConfig

from engine.config import LoRAConfig, RLConfig
from engine.config.rl import CriticLoRAConfig
from engine.dataflows import choose_dataflow
from engine.dataflows.required_passes import RequiredPasses
from engine.errors import ConfigError
from engine.models import MIXTURES, text_config
from engine.parallel.decoder_plan import FAMILIES
from engine.parallel.layout import Experts, Layout, ModelShape
from engine.parallel.sharding_specs import ROLLOUT_FAMILIES
from engine.planner import Workload
from engine.rollout.protocol import engine_capabilities
from engine.trainers.rl_setup import effective_config
from engine.trainers.rollout_sources import get_rollout_source, sampler_count

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


def _adapters(shape: ModelShape, lora: LoRAConfig | CriticLoRAConfig) -> int:
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
