"""The roles that a dataflow can name, and how each is built from the settings of a run.

A role of your own is one module that `plugins` names:

    @register_role("judge")
    def judge(spec: RunSpec) -> RoleSpec:
        return RoleSpec("judge", JudgeWorker, {"model_path": spec.model_path})

A dataflow with "judge" among its `roles` calls it as `roles["judge"]`. It runs in a process of its
own, unless `trainer.pools` places it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from engine.config import ActorConfig, CriticConfig, RLConfig
from engine.controller.worker_host import RoleSpec
from engine.dataflows import choose_dataflow
from engine.registry import Registry
from engine.trainers.layouts import parallel_of

if TYPE_CHECKING:
    from engine.trainers.rl_setup import RunSpec

ROLES: Registry[Callable[[RunSpec], RoleSpec]] = Registry(
    "role", "role", decorator="@register_role(name)"
)
register_role = ROLES.register

R = TypeVar("R", ActorConfig, CriticConfig)


@register_role("actor")
def _actor(spec: RunSpec) -> RoleSpec:
    from engine.workers.actor import ActorWorker

    config = spec.config
    rows = choose_dataflow(config.algorithm).rows_an_update(config)
    own = {
        "config": _with_warmup(config.actor, rows),
        "lora": spec.lora,
        "temperature": config.rollout.temperature,
        "total_steps": _optimizer_steps(config, config.actor, rows),
        "seed": spec.seed,
        "preference": config.algorithm.preference,
        "distillation": config.algorithm.distillation,
        "sum_pi_squared": spec.needs.sum_pi_squared,
        "sampler_dtype": config.rollout.dtype,
        "delta_sync": config.trainer.delta_sync,
    }
    return RoleSpec("actor", ActorWorker, _model(spec) | own)


@register_role("critic")
def _critic(spec: RunSpec) -> RoleSpec:
    from engine.workers.critic import CriticWorker

    config = spec.config
    rows = config.trainer.train_batch_size * config.rollout.n
    own = {
        "config": _with_warmup(config.critic, rows),
        "total_steps": _optimizer_steps(config, config.critic, rows),
        "seed": spec.seed,
        "parallel": parallel_of("critic", config),
    }
    if config.critic.model_path:
        own["model_path"] = config.critic.model_path
    return RoleSpec("critic", CriticWorker, _model(spec) | own)


@register_role("rollout")
def _rollout(spec: RunSpec) -> RoleSpec:
    from engine.workers.rollout import RolloutWorker

    rollout = spec.config.rollout
    if spec.samplers:  # beside them, the trainer's own rollout role only validates
        tp = spec.config.actor.parallel.tp
        own = {"engine": "native", "options": {}, "tensor_parallel_size": tp}
        rollout = rollout.model_copy(update=own)
    options = _model(spec) | _sampling(spec) | {"config": rollout}
    if rollout.multi_turn.enable:
        from engine.workers.agent_rollout import AgentRolloutWorker

        return RoleSpec("rollout", AgentRolloutWorker, options)
    return RoleSpec("rollout", RolloutWorker, options)


@register_role("sampler")
def _sampler(spec: RunSpec) -> RoleSpec:
    from engine.workers.rollout import RolloutWorker

    options = _sampling(spec) | _policy_copy(spec)
    if spec.config.rollout.multi_turn.enable:
        from engine.workers.agent_rollout import AgentRolloutWorker

        return RoleSpec("sampler", AgentRolloutWorker, options)
    return RoleSpec("sampler", RolloutWorker, options)


@register_role("reference")
def _reference(spec: RunSpec) -> RoleSpec:
    from engine.workers.reference import ReferenceWorker

    options = _model(spec) | _frozen(spec) | {"base_of_policy": True}
    if spec.config.reference.offload_params:
        options["parallel"] = options["parallel"].model_copy(update={"offload_params": True})
    return RoleSpec("reference", ReferenceWorker, options)


@register_role("teacher")
def _teacher(spec: RunSpec) -> RoleSpec:
    from engine.workers.teacher import TeacherWorker

    algorithm = spec.config.algorithm
    own = {"teachers": algorithm.teachers, "settings": algorithm.distillation}
    return RoleSpec("teacher", TeacherWorker, _model(spec) | _frozen(spec) | own)


@register_role("reward")
def _reward(spec: RunSpec) -> RoleSpec:
    from engine.workers.reward import RewardWorker

    options = {
        "model_path": spec.model_path,
        "config": spec.config.reward,
        "plugins": spec.config.plugins,
    }
    return RoleSpec("reward", RewardWorker, options)


def stream_sampler(name: str, spec: RunSpec) -> RoleSpec:
    """One worker of asynchronous rollout."""
    from engine.workers.stream_rollout import StreamRolloutWorker

    options = _sampling(spec) | _policy_copy(spec)
    if spec.config.rollout.multi_turn.enable:
        from engine.workers.agent_rollout import AgentStreamWorker

        return RoleSpec(name, AgentStreamWorker, options)
    return RoleSpec(name, StreamRolloutWorker, options)


def _model(spec: RunSpec) -> dict[str, Any]:
    return {"model_path": spec.model_path, "dtype": spec.dtype}


def _policy_copy(spec: RunSpec) -> dict[str, str]:
    """The model of a sampler, which has a copy of the policy."""
    return {"model_path": spec.model_path, "dtype": spec.config.rollout.dtype or spec.dtype}


def _sampling(spec: RunSpec) -> dict[str, object]:
    options = {
        "config": spec.config.rollout,
        "lora": spec.lora,
        "max_response_length": spec.max_response_length,
        "max_model_len": spec.max_model_len,
        "seed": spec.seed,
    }
    if spec.config.rollout.multi_turn.enable:
        options |= {"template_variables": spec.template_variables, "plugins": spec.config.plugins}
    return options


def _frozen(spec: RunSpec) -> dict[str, Any]:
    return {
        "parallel": parallel_of("reference", spec.config),
        "temperature": spec.config.rollout.temperature,
        "max_tokens_per_micro_batch": spec.config.actor.max_tokens_per_micro_batch,
    }


def _optimizer_steps(config: RLConfig, role: ActorConfig | CriticConfig, rows: int) -> int:
    """Optimizer steps of the whole run, with `rows` completions in an update."""
    return config.trainer.total_training_steps * _steps_per_update(role, rows)


def _steps_per_update(role: ActorConfig | CriticConfig, rows: int) -> int:
    return role.ppo_epochs * math.ceil(rows / (role.ppo_mini_batch_size or rows))


def _with_warmup(role: R, rows: int) -> R:
    """The section with `optim.warmup_steps`, if given, counted in optimizer steps."""
    if role.optim.warmup_steps is None:
        return role
    steps = role.optim.warmup_steps * _steps_per_update(role, rows)
    optim = role.optim.model_copy(update={"warmup_steps": steps})
    return role.model_copy(update={"optim": optim})
