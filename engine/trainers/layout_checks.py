"""Which layouts an RL run's roles can have, by its settings, its model and the model's experts.

`check_layouts` is called once the placement is known, `check_parallel` by training on rows too.
"""

from transformers import PretrainedConfig

from engine.config import LoRAConfig, ParallelConfig, RLConfig
from engine.dataflows import choose_dataflow
from engine.errors import ConfigError
from engine.models import MIXTURES, text_config
from engine.parallel.layout import Experts, Layout, ModelShape, check_layout
from engine.rollout.protocol import engine_capabilities
from engine.trainers.run_spec import layout_of, parallel_of, rollout_tp, sampler_count


def check_layouts(
    config: RLConfig, lora: LoRAConfig, model_config: PretrainedConfig | None = None
) -> None:
    """Raise ConfigError for layouts that the settings, or the model, don't allow."""
    for role in ("actor", "critic"):
        layout, read = layout_of(role, config), model_config
        if role == "critic" and config.critic.model_path and model_config is not None:
            read = text_config(config.critic.model_path)
        check_parallel(f"{role}.parallel", parallel_of(role, config), lora, read)
        if layout.world_size > 1 and config.trainer.placement == "local":
            raise ConfigError(
                f"{role}.parallel is a layout of {layout.world_size} ranks ({layout}), and "
                "trainer.placement=local runs one process; set trainer.placement=ray"
            )
    _check_actor(config)
    if sampler_count(config.trainer):
        _check_samplers(config)
    if model_config is not None:
        _check_moe(config, model_config)


def check_parallel(
    name: str, parallel: ParallelConfig, lora: LoRAConfig, model_config: PretrainedConfig | None
) -> None:
    """Raise ConfigError for a layout that no policy, or this model, takes; `name`: its setting."""
    layout = Layout.of(parallel)
    if layout.world_size > 1 and model_config is not None:
        for axis in ("tp", "pp"):
            if (size := getattr(parallel, axis)) > 1 and Experts.of(model_config) is not None:
                raise ConfigError(
                    f"{name}.{axis}={size} with a mixture of experts ({model_config.model_type}): "
                    f"fsdp alone spreads experts; set {axis} to 1 and {name}.fsdp to the ranks"
                )
        check_layout(layout, layout.world_size, ModelShape.of(model_config))
    for setting in ("offload_params", "offload_policy"):
        if getattr(parallel, setting) and layout.fsdp * layout.sp == 1:
            raise ConfigError(f"{name}.{setting} is FSDP's; set {name}.fsdp to 2 or more")
    if lora.quantize and layout.tp > 1:
        raise ConfigError(
            f"model.lora.quantize={lora.quantize} with {name}.tp={layout.tp}: a quantised base "
            "can't be split; set tp=1"
        )


def _check_actor(config: RLConfig) -> None:
    layout, rollout, actor = layout_of("actor", config), config.rollout, config.actor
    if config.reference.offload_params and layout.fsdp * layout.sp == 1:
        raise ConfigError(
            "reference.offload_params is FSDP's; set actor.parallel.fsdp to 2 or more"
        )
    tp = rollout_tp(config)
    if not sampler_count(config.trainer) and layout.world_size % tp:
        raise ConfigError(
            f"rollout.tensor_parallel_size={tp} does not divide the actor's {layout.world_size} "
            f"ranks ({layout}); choose a divisor"
        )
    if layout.pp > 1 and actor.use_kl_loss and actor.kl_loss_type == "full":
        raise ConfigError(
            f"actor.kl_loss_type=full with actor.parallel.pp={layout.pp}: the exact KL needs both "
            "models' logits in one place; choose an estimator such as low_var_kl, or pp=1"
        )
    size, least = actor.ppo_mini_batch_size, 2 * layout.data_ranks
    if choose_dataflow(config.algorithm).pairs and 0 < size < least:
        raise ConfigError(
            f"actor.ppo_mini_batch_size={size} holds no pair of completions for each of "
            f"{layout.data_ranks} data-parallel ranks; set {least} or more, or 0 for all"
        )
    prompts = config.trainer.train_batch_size
    for name, size in (("completions of a step", prompts * rollout.n), ("prompts", prompts)):
        if size < layout.world_size:
            raise ConfigError(
                f"{size} {name} don't give each of the actor's {layout.world_size} ranks one; "
                "give more rows or a larger trainer.train_batch_size, or use fewer ranks"
            )
    each = prompts // max(1, layout.world_size // tp)
    if rollout.parts > 1 and each < rollout.parts:
        raise ConfigError(
            f"rollout.parts={rollout.parts} is more than the {each} prompts that each copy of the "
            f"policy decodes (trainer.train_batch_size={prompts}); lower it"
        )


def _check_samplers(config: RLConfig) -> None:
    samplers, rollout = sampler_count(config.trainer), config.rollout
    why, tp = f"with trainer.mode={config.trainer.mode}", rollout.tensor_parallel_size
    capabilities = engine_capabilities(rollout)
    if tp > 1 and not capabilities.own_processes:
        raise ConfigError(
            f"rollout.tensor_parallel_size={tp} {why} and rollout.engine={rollout.engine}: a "
            "sampler is one process; set it to 1, or use vllm with rollout.vllm.in_process=false"
        )
    if samplers > config.trainer.train_batch_size:
        raise ConfigError(
            f"trainer.rollout_workers={samplers} is more than the prompts of a step "
            f"(trainer.train_batch_size={config.trainer.train_batch_size}); lower it"
        )
    if samplers > 1 and capabilities.remote:
        raise ConfigError(
            f"trainer.rollout_workers={samplers} {why} and rollout.engine={rollout.engine}: one "
            "process speaks to all servers; set it to 1, and name them in rollout.server.urls"
        )
    pools = {role: pool for pool in config.trainer.pools for role in pool.roles}
    gpus = pools["sampler"].gpus if "sampler" in pools else 0.0
    if not capabilities.remote and "actor" in pools and pools["actor"].gpus and not gpus:
        raise ConfigError(
            "trainer.pools gives the actor GPUs and the processes that only decode none, which "
            f"would decode on the CPU; add {{roles: [sampler], gpus: {tp}}}"
        )
    if capabilities.own_processes and 0 < gpus < tp:
        raise ConfigError(
            f"trainer.pools gives a sampler {gpus:g} GPUs, and rollout.tensor_parallel_size={tp} "
            f"takes {tp}; set gpus of the pool [sampler] to {tp}"
        )


def _check_moe(config: RLConfig, model_config: PretrainedConfig) -> None:
    rollout, kind = config.rollout, model_config.model_type
    setting = _routing_setting(config)
    if setting and kind not in MIXTURES:
        raise ConfigError(
            f"{setting} with a model of type {kind!r}: it is for mixtures of experts "
            f"({', '.join(MIXTURES)}); leave it out"
        )
    if Experts.of(model_config) is None:
        return
    capabilities = engine_capabilities(rollout)
    splits_experts = capabilities.loads_shards or capabilities.own_processes
    if rollout.tensor_parallel_size > 1 and not splits_experts:
        raise ConfigError(
            f"rollout.tensor_parallel_size={rollout.tensor_parallel_size} with a mixture of "
            f"experts ({kind}): {rollout.engine} doesn't split them; set it to 1, or use vllm"
        )
    if setting:
        _check_routing(config, setting)


def _routing_setting(config: RLConfig) -> str:
    """The setting that looks at routers; empty where none does."""
    actor = config.actor
    if config.rollout.enable_rollout_routing_replay and actor.router_replay.mode != "R3":
        raise ConfigError(
            "rollout.enable_rollout_routing_replay records experts for "
            f"actor.router_replay.mode=R3, which is {actor.router_replay.mode}; set both or neither"
        )
    if actor.router_replay.mode != "disabled":
        return f"actor.router_replay.mode={actor.router_replay.mode}"
    if actor.router_aux_loss_coef:
        return f"actor.router_aux_loss_coef={actor.router_aux_loss_coef}"
    return ""


def _check_routing(config: RLConfig, setting: str) -> None:
    actor, mode = config.actor, config.actor.router_replay.mode
    if actor.parallel.sp > 1:
        raise ConfigError(
            f"{setting} with actor.parallel.sp={actor.parallel.sp}: what routers choose is kept by "
            "whole rows; set sp to 1"
        )
    if actor.use_kl_loss and actor.kl_loss_type == "full":
        raise ConfigError(
            f"{setting} with actor.kl_loss_type=full: two models' routers run in one pass; choose "
            "an estimator such as low_var_kl"
        )
    if choose_dataflow(config.algorithm).pairs:
        raise ConfigError(
            f"{setting} with algorithm.dataflow={config.algorithm.dataflow}: only losses of "
            "advantages have it; leave it out"
        )
    if mode == "R2" and actor.old_log_probs == "rollout":
        raise ConfigError(
            "actor.router_replay.mode=R2 with actor.old_log_probs=rollout: R2 records what the "
            "trainer's own pass chooses; set old_log_probs to auto, or mode to R3"
        )
    if mode != "R3":  # else rollout must have recorded what the update repeats
        return
    rollout, run_mode = config.rollout, config.trainer.mode
    if not rollout.enable_rollout_routing_replay:
        raise ConfigError(
            "actor.router_replay.mode=R3 repeats what rollout's routers chose, and rollout doesn't "
            "record it; set rollout.enable_rollout_routing_replay=true"
        )
    where, capabilities = "actor.router_replay.mode=R3 with rollout.", engine_capabilities(rollout)
    if "enable_rollout_routing_replay" not in capabilities.settings:
        raise ConfigError(
            f"{where}engine={rollout.engine}, which doesn't record experts; set it to native or "
            "vllm, or actor.router_replay.mode=R2"
        )
    if (rollout.parts > 1 or run_mode == "async") and not capabilities.streams_experts:
        raise ConfigError(
            f"{where}engine={rollout.engine}, rollout.parts={rollout.parts} and trainer.mode="
            f"{run_mode}: it records experts in whole batches alone; set them to vllm, or to "
            "1 and sync or one_step_off, or actor.router_replay.mode=R2"
        )
