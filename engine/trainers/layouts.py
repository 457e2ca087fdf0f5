"""The layout of each role: how its model is sharded, and whether model and settings allow that.

Values only; workers create process groups, the controller starts processes.
"""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PretrainedConfig

from engine.config import LoRAConfig, ParallelConfig, RLConfig
from engine.dataflows import choose_dataflow
from engine.errors import ConfigError
from engine.models import text_config
from engine.parallel.layout import Layout, ModelShape, RankGrid, check_layout
from engine.parallel.rollout_layout import rollout_layout
from engine.rollout.protocol import engine_capabilities
from engine.trainers.mixtures import check_mixture, check_mixture_axes
from engine.trainers.rollout_sources import sampler_count

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
    """The layout of a role's ranks."""
    return Layout.of(parallel_of(role, config))


def pool_size(roles: Iterable[str], config: RLConfig) -> int:
    """Processes of a pool; raises ConfigError where its roles disagree."""
    layouts = {role: layout_of(role, config) for role in roles}
    sizes = {layout.world_size for layout in layouts.values()}
    if len(sizes) > 1:
        text = ", ".join(f"{role}: {layout}" for role, layout in layouts.items())
        raise ConfigError(
            f"roles that share processes have layouts of different sizes ({text}); make them "
            "equal, or give them pools of their own (trainer.pools)"
        )
    return sizes.pop()


def call_layout(role: str, config: RLConfig) -> RankGrid | None:
    """The layout over which a role's calls are split; None for one rank."""
    layout = layout_of(role, config)
    if layout.world_size == 1:
        return None
    if role == "rollout":
        apart = sampler_count(config.trainer) > 0
        return rollout_layout(layout, tp=layout.tp if apart else _rollout_tp(config))
    return layout


def _rollout_tp(config: RLConfig) -> int:
    """Tensor-parallel size of rollout on the actor's ranks; 1 for engines with own processes."""
    own_processes = engine_capabilities(config.rollout).own_processes
    return 1 if own_processes else config.rollout.tensor_parallel_size


def check_layouts(
    config: RLConfig, lora: LoRAConfig, model_config: PretrainedConfig | None = None
) -> None:
    """Raise ConfigError for layouts that the settings, or the model, don't allow."""
    for role in ("actor", "critic"):
        parallel, layout = parallel_of(role, config), layout_of(role, config)
        own = config.critic.model_path if role == "critic" else ""
        read = text_config(own) if own and model_config is not None else model_config
        check_parallel(f"{role}.parallel", parallel, lora, read)
        if layout.world_size > 1 and config.trainer.placement == "local":
            raise ConfigError(
                f"{role}.parallel is a layout of {layout.world_size} ranks ({layout}), and "
                "trainer.placement=local runs one process; set trainer.placement=ray"
            )
    _check_actor(config, lora)
    if model_config is not None:
        check_mixture(config, model_config)


def check_parallel(
    name: str, parallel: ParallelConfig, lora: LoRAConfig, model_config: PretrainedConfig | None
) -> None:
    """Raise ConfigError for a layout that no policy, or this model, takes; `name`: its setting."""
    layout = Layout.of(parallel)
    if layout.world_size > 1 and model_config is not None:
        check_mixture_axes(name, parallel, model_config)
        check_layout(layout, layout.world_size, ModelShape.of(model_config))
    if parallel.offload_params and layout.fsdp * layout.sp == 1:
        raise ConfigError(f"{name}.offload_params is FSDP's; set {name}.fsdp to 2 or more")
    if lora.quantize and layout.tp > 1:
        raise ConfigError(
            f"model.lora.quantize={lora.quantize} with {name}.tp={layout.tp}: a quantised base "
            "can't be split; set tp=1"
        )


def _check_actor(config: RLConfig, lora: LoRAConfig) -> None:
    layout, rollout = layout_of("actor", config), config.rollout
    if config.reference.offload_params and layout.fsdp * layout.sp == 1:
        raise ConfigError(
            "reference.offload_params is FSDP's; set actor.parallel.fsdp to 2 or more"
        )
    apart = sampler_count(config.trainer) > 0
    if not apart and layout.world_size % _rollout_tp(config):
        raise ConfigError(
            f"rollout.tensor_parallel_size={rollout.tensor_parallel_size} does not divide the "
            f"actor's {layout.world_size} ranks ({layout}); choose a divisor"
        )
    full = config.actor.use_kl_loss and config.actor.kl_loss_type == "full"
    if layout.pp > 1 and full:
        raise ConfigError(
            f"actor.kl_loss_type=full with actor.parallel.pp={layout.pp}: the exact KL needs both "
            "models' logits in one place; choose an estimator such as low_var_kl, or pp=1"
        )
    _check_samplers(config)
    size, every = config.actor.ppo_mini_batch_size, 2 * layout.data_ranks
    if choose_dataflow(config.algorithm).pairs and 0 < size < every:
        raise ConfigError(
            f"actor.ppo_mini_batch_size={size} holds no pair of completions for each of "
            f"{layout.data_ranks} data-parallel ranks; set {every} or more, or 0 for all"
        )
    prompts = config.trainer.train_batch_size
    for name, size in (("completions of a step", prompts * rollout.n), ("prompts", prompts)):
        if size < layout.world_size:
            raise ConfigError(
                f"{size} {name} don't give each of the actor's {layout.world_size} ranks one; "
                "raise trainer.train_batch_size or use fewer ranks"
            )
    copies = layout.world_size // _rollout_tp(config)
    if rollout.parts > 1 and prompts // copies < rollout.parts:
        raise ConfigError(
            f"rollout.parts={rollout.parts} is more than the {prompts // copies} prompts that "
            f"each of {copies} copies of the policy decodes (trainer.train_batch_size={prompts}); "
            "lower it"
        )


def _check_samplers(config: RLConfig) -> None:
    """Raise ConfigError for processes that only decode and can't be as they are asked for."""
    samplers, rollout = sampler_count(config.trainer), config.rollout
    if not samplers:
        return
    why, tp = f"with trainer.mode={config.trainer.mode}", rollout.tensor_parallel_size
    capabilities = engine_capabilities(rollout)
    if tp > 1 and not capabilities.own_processes:
        raise ConfigError(
            f"rollout.tensor_parallel_size={tp} {why} and rollout.engine={rollout.engine}: a "
            "sampler is one process; set it to 1, or rollout.engine=vllm with "
            "rollout.vllm.in_process=false, which starts processes of its own"
        )
    if samplers > config.trainer.train_batch_size:
        raise ConfigError(
            f"trainer.rollout_workers={samplers} is more than the prompts of a step "
            f"(trainer.train_batch_size={config.trainer.train_batch_size}); lower it"
        )
    if samplers > 1 and capabilities.remote:
        raise ConfigError(
            f"trainer.rollout_workers={samplers} {why} and rollout.engine={rollout.engine}: one "
            "process speaks to all servers, and brings them their weights; set it to 1, and name "
            "the servers in rollout.server.urls"
        )
    pools = {role: pool for pool in config.trainer.pools for role in pool.roles}
    gpus = pools["sampler"].gpus if "sampler" in pools else 0.0
    decodes_here = not capabilities.remote
    if decodes_here and "actor" in pools and pools["actor"].gpus and not gpus:
        raise ConfigError(
            "trainer.pools gives the actor GPUs and the processes that only decode none, which "
            f"would decode on the CPU; add {{roles: [sampler], gpus: {tp}}}"
        )
    if capabilities.own_processes and 0 < gpus < tp:
        raise ConfigError(
            f"trainer.pools gives a sampler {gpus:g} GPUs, and rollout.tensor_parallel_size={tp} "
            f"takes {tp}; set gpus of the pool [sampler] to {tp}"
        )
