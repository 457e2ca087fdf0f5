"""Which settings go with a mixture-of-experts model (MoE), and which with nothing else.

Checked with the layouts of roles; other checks are in `run_plan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import ParallelConfig, RLConfig
from engine.dataflows import choose_dataflow
from engine.errors import ConfigError
from engine.models import MIXTURES
from engine.parallel.layout import Experts
from engine.rollout.protocol import engine_capabilities

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_mixture(config: RLConfig, model_config: PretrainedConfig) -> None:
    """Raise ConfigError for settings that this model's experts don't take, or that it has none for.

    `model_config` is transformers' of the policy.
    """
    rollout, kind = config.rollout, model_config.model_type
    asked = _routing_setting(config)
    if asked and kind not in MIXTURES:
        raise ConfigError(
            f"{asked} with a model of type {kind!r}: it is for mixtures of experts "
            f"({', '.join(MIXTURES)}); leave it out"
        )
    if Experts.of(model_config) is None:
        return
    capabilities = engine_capabilities(rollout)
    splits_experts = capabilities.loads_shards or capabilities.own_processes
    if rollout.tensor_parallel_size > 1 and not splits_experts:
        raise ConfigError(
            f"rollout.tensor_parallel_size={rollout.tensor_parallel_size} with a mixture of "
            f"experts ({kind}) and rollout.engine={rollout.engine}: it doesn't split experts over "
            "ranks; set it to 1, or rollout.engine=vllm"
        )
    if asked:
        _check_routing(config, asked)


def check_mixture_axes(name: str, parallel: ParallelConfig, model_config: PretrainedConfig) -> None:
    """Raise ConfigError where a mixture would be cut by tp or pp; `name` is the setting."""
    for axis in ("tp", "pp"):
        if getattr(parallel, axis) > 1 and Experts.of(model_config) is not None:
            raise ConfigError(
                f"{name}.{axis}={getattr(parallel, axis)} with a mixture of experts "
                f"({model_config.model_type}): experts are spread by fsdp alone; set {axis} to 1 "
                f"and {name}.fsdp to the number of ranks"
            )


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


def _check_routing(config: RLConfig, asked: str) -> None:
    actor, mode = config.actor, config.actor.router_replay.mode
    if actor.parallel.sp > 1:
        raise ConfigError(
            f"{asked} with actor.parallel.sp={actor.parallel.sp}: what routers choose is kept by "
            "whole rows; set sp to 1"
        )
    if actor.use_kl_loss and actor.kl_loss_type == "full":
        raise ConfigError(
            f"{asked} with actor.kl_loss_type=full: two models' routers run in one pass; choose "
            "an estimator such as low_var_kl"
        )
    if choose_dataflow(config.algorithm).pairs:
        raise ConfigError(
            f"{asked} with algorithm.dataflow={config.algorithm.dataflow}: only losses of "
            "advantages have it; leave it out"
        )
    if mode == "R2" and actor.old_log_probs == "rollout":
        raise ConfigError(
            "actor.router_replay.mode=R2 with actor.old_log_probs=rollout: R2 records what the "
            "trainer's own pass chooses; set old_log_probs to auto, or mode to R3"
        )
    if mode == "R3":
        _check_r3(config)


def _check_r3(config: RLConfig) -> None:
    """Rollout must have recorded what the update repeats."""
    rollout, mode = config.rollout, config.trainer.mode
    if not rollout.enable_rollout_routing_replay:
        raise ConfigError(
            "actor.router_replay.mode=R3 repeats what rollout's routers chose, and rollout doesn't "
            "record it; set rollout.enable_rollout_routing_replay=true"
        )
    if rollout.engine != "native" or rollout.parts > 1 or mode == "async":
        raise ConfigError(
            f"actor.router_replay.mode=R3 with rollout.engine={rollout.engine}, rollout.parts="
            f"{rollout.parts} and trainer.mode={mode}: native records experts in whole batches "
            "alone; set them to native, 1 and sync or one_step_off, or actor.router_replay.mode=R2"
        )
