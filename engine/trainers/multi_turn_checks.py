"""Whether the settings of a multi-turn run make sense together (docs/agents.md)."""

from __future__ import annotations

from collections.abc import Iterator

from engine.agents.registry import environment_class
from engine.config import RLConfig
from engine.dataflows.registry import Dataflow
from engine.errors import ConfigError
from engine.rewards.environment import NAME as ENVIRONMENT
from engine.rollout.protocol import engine_capabilities
from engine.trainers.rollout_sources import sampler_count

# Estimators that take an episode of several rows as one completion.
_OF_EPISODES = ("gae_turn", "grpo", "grpo_passk", "grpo_turn", "gpg", "maxrl", "rloo")


def check_multi_turn(config: RLConfig, dataflow: Dataflow) -> None:
    """Raise ConfigError for what episodes don't go with, and for a reward that needs episodes."""
    if not config.rollout.multi_turn.enable:
        if config.reward.name == ENVIRONMENT:
            raise ConfigError(
                "reward.name=environment is what an episode's environment gives; set "
                "rollout.multi_turn.enable=true and rollout.agent.environment.name, or name another"
            )
        return
    if not config.rollout.agent.environment.name:
        raise ConfigError(
            "rollout.multi_turn.enable needs rollout.agent.environment.name, a registered "
            "environment or package.module:Class; set it"
        )
    environment_class(config.rollout.agent.environment.name)
    for setting, wanted in _refused(config, dataflow):
        raise ConfigError(f"{setting} doesn't go with rollout.multi_turn.enable; {wanted}")


def _refused(config: RLConfig, dataflow: Dataflow) -> Iterator[tuple[str, str]]:
    """Settings that episodes don't go with, and what to set."""
    rollout, own = config.rollout, engine_capabilities(config.rollout)
    ahead = sampler_count(config.trainer) > 0
    if not own.streams:
        wanted = "turns are decoded in a stream: use native, vllm or server"
        yield f"rollout.engine={rollout.engine}", wanted
    if rollout.tensor_parallel_size > 1 and not own.own_processes:
        setting = f"rollout.tensor_parallel_size={rollout.tensor_parallel_size}"
        wanted = "turns are decoded on one rank each: set it to 1"
        yield setting, wanted + (", or rollout.vllm.in_process=false" if own.loads_shards else "")
    if ahead and (tp := config.actor.parallel.tp) > 1:
        wanted = "validation would decode turns on several ranks: set it to 1, or mode=sync"
        yield f"actor.parallel.tp={tp} with trainer.mode={config.trainer.mode}", wanted
    if own.remote and rollout.server.api == "tgi":
        wanted = "it takes text, and would read sampled ids as others: use api=openai"
        yield "rollout.server.api=tgi", wanted
    if rollout.agent.turn_timeout_s is not None and not own.cuts:
        setting = f"rollout.agent.turn_timeout_s with rollout.engine={rollout.engine}"
        wanted = "it answers whole turns: limit them by rollout.multi_turn.max_turn_length"
        yield setting, wanted
    if rollout.enable_rollout_routing_replay:
        yield "rollout.enable_rollout_routing_replay", "remove it"
    if config.reward.overlong_buffer.enable:
        setting = "reward.overlong_buffer.enable"
        yield setting, "limit turns by rollout.multi_turn.max_assistant_turns"
    if rollout.multi_turn.history == "branches":
        name = config.algorithm.adv_estimator
        if dataflow.name not in ("grpo", "ppo") or name not in _OF_EPISODES:
            setting = f"rollout.multi_turn.history=branches with algorithm.adv_estimator={name}"
            setting += f" and dataflow {dataflow.name}"
            yield setting, f"choose one of {', '.join(_OF_EPISODES)}, or history=append"
