"""All checks of an RL run's settings before it starts; nothing is computed here.

Whether settings make sense together, for several turns and for distillation too, and which have
no effect. What the run is made of is in `run_spec`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from engine.agents.environment_protocol import environment_class
from engine.algorithms import advantages
from engine.algorithms.correction import check_correction
from engine.algorithms.divergences import check_kind
from engine.config import KLControlConfig, RLConfig, TeacherConfig
from engine.data.tokenizer import load_tokenizer
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import Dataflow, RequiredPasses
from engine.errors import ConfigError
from engine.models import require_model_folder, vocabulary_and_context
from engine.registry import import_plugins
from engine.rewards import Scorer
from engine.rewards.formats import NAME as ENVIRONMENT
from engine.rollout.protocol import ENGINE_SETTINGS, check_engine_settings, engine_capabilities
from engine.trainers.run_spec import effective_config, get_rollout_source, sampler_count
from engine.workers.algorithm_options import (
    ACTOR_FIELDS,
    ADVANTAGE_FIELDS,
    advantage_options,
    changed,
    policy_loss_options,
    preference_options,
)

# Whether the settings of distillation make sense together; nothing is computed here.

_SERVED = tuple(
    name for name in TeacherConfig.model_fields if name not in ("model", "url", "weight", "rows")
)


def check_teachers(config: RLConfig) -> None:
    """Raise ConfigError for teachers, a loss or a layout that don't go together."""
    algorithm, settings = config.algorithm, config.algorithm.distillation
    if not algorithm.teachers:
        raise ConfigError(
            "algorithm.dataflow=distillation learns from a teacher; set algorithm.teacher to a "
            "model folder, or algorithm.distillation.teachers"
        )
    if config.actor.use_kl_loss:
        raise ConfigError(
            "actor.use_kl_loss with algorithm.dataflow=distillation: the KL to the teacher is "
            "what is learned already; set actor.use_kl_loss=false"
        )
    compares = settings.loss != "policy_gradient"
    for i, teacher in enumerate(settings.teachers):
        if teacher.url:
            _check_served(config, f"algorithm.distillation.teachers[{i}].url={teacher.url}")
    parallel = config.actor.parallel
    if compares and (parallel.tp > 1 or parallel.pp > 1):
        raise ConfigError(
            f"algorithm.distillation.loss={settings.loss} with actor.parallel.tp={parallel.tp} and "
            f"pp={parallel.pp}: it needs all logits of a token in one place; set both to 1 (dp, "
            "fsdp and sp go), or take loss=policy_gradient"
        )
    for setting, path in algorithm.teacher_models.items():
        require_model_folder(path, setting)


def compares_whole_vocabularies(config: RLConfig) -> bool:
    """Whether student and teachers meet in one process, as both have logits over all tokens."""
    settings = config.algorithm.distillation
    return settings.loss != "policy_gradient" and not settings.top_k


def check_teacher_tokens(
    config: RLConfig,
    max_model_len: int,
    check_tokens: Callable[[str, str, str], None],
) -> None:
    """Raise ConfigError for a teacher that reads other tokens than the student, or fewer.

    `check_tokens(setting, folder, why)` compares a tokenizer's vocabulary.
    """
    why = "distillation compares token by token"
    for setting, path in config.algorithm.teacher_models.items():
        check_tokens(setting, path, why)
        context = vocabulary_and_context(path)[1]
        if context < max_model_len:
            raise ConfigError(
                f"{setting}={path} reads {context} tokens, and prompt and completion have up to "
                f"{max_model_len}; lower data.max_response_length, or choose another teacher"
            )
    for i, teacher in enumerate(config.algorithm.distillation.teachers):
        if teacher.tokenizer:
            setting = f"algorithm.distillation.teachers[{i}].tokenizer"
            check_tokens(setting, teacher.tokenizer, why)


def unused_distillation(config: RLConfig) -> Iterator[tuple[str, str]]:
    """Changed settings of distillation that nothing reads, each with the reason."""
    settings, section = config.algorithm.distillation, "algorithm.distillation"
    if settings.loss != "jsd" and settings.beta != 0.5:
        yield f"{section}.beta={settings.beta}", f"with loss={settings.loss}"
    if settings.loss == "policy_gradient" and settings.top_k:
        yield f"{section}.top_k={settings.top_k}", "with loss=policy_gradient"
    for i, teacher in enumerate(settings.teachers):
        name = f"{section}.teachers[{i}]"
        if settings.route_by and teacher.weight != 1:
            yield f"{name}.weight={teacher.weight}", "with route_by: a row has one teacher"
        for field in () if teacher.url else _SERVED:
            value = getattr(teacher, field)
            if value != TeacherConfig.model_fields[field].default:
                yield f"{name}.{field}={value}", "without url"


def _check_served(config: RLConfig, setting: str) -> None:
    if compares_whole_vocabularies(config):
        raise ConfigError(
            f"{setting} with algorithm.distillation.loss={config.algorithm.distillation.loss} and "
            "top_k=0: a server gives log-probs of the likeliest tokens alone; set "
            "algorithm.distillation.top_k, to 16 for instance"
        )
    if config.rollout.temperature != 1:
        raise ConfigError(
            f"{setting} with rollout.temperature={config.rollout.temperature}: a server gives "
            "log-probs at temperature 1; set rollout.temperature=1"
        )


# Whether the settings of a multi-turn run make sense together (docs/agents.md).

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


# Settings that were changed from their defaults but have no effect with the others.
#
# They are refused, so that nobody tunes a setting that nothing reads.

UnusedSettings = Iterator[tuple[str, str]]  # (setting, why it has no effect)

_KL_LOSS = ("kl_loss_coef", "kl_loss_type")
_ASYNC = ("staleness", "rollout_silence_s", "max_rollout_restarts")
_WEIGHTS = ("rollout_is_threshold", "rollout_is_batch_normalize")
_POLICY_LOSS = (
    *ACTOR_FIELDS,
    "loss_agg_mode",
    "loss_scale_factor",
    "entropy_coeff",
    "old_log_probs",
)


def unused_settings(config: RLConfig, dataflow: Dataflow) -> UnusedSettings:
    """Changed settings that nothing reads, each with the reason."""
    yield from _unused_for_kl(config)
    yield from _unused_for_engine(config)
    yield from _unused_for_mode(config)
    yield from _unused_for_dataflow(config, dataflow)
    if not dataflow.uses_advantages:
        yield from _unused_without_advantages(config, dataflow)
    if dataflow.pairs:
        yield from _unused_with_pairs(config, dataflow)
    yield from _unused_for_reward(config, dataflow)
    if not config.rollout.multi_turn.enable:
        why = "without rollout.multi_turn.enable"
        yield from _changed_settings("rollout.multi_turn", config.rollout.multi_turn, why)
        yield from _changed_settings("rollout.agent", config.rollout.agent, why)
    if not config.rollout.val_kwargs.do_sample:
        why = "without rollout.val_kwargs.do_sample"
        yield from _changed_settings("rollout.val_kwargs", config.rollout.val_kwargs, why)
    if not config.trainer.log_rollouts_freq:
        why = "with trainer.log_rollouts_freq=0"
        yield from _changed_settings("trainer", config.trainer, why, ("log_rollouts_rows",))


def _unused_for_kl(config: RLConfig) -> UnusedSettings:
    algorithm, actor = config.algorithm, config.actor
    if not actor.use_kl_loss:
        yield from _changed_settings("actor", actor, "without actor.use_kl_loss", _kl_loss(config))
    if not algorithm.use_kl_in_reward:
        why = "without algorithm.use_kl_in_reward"
        yield from _changed_settings("algorithm", algorithm, why, ("kl_penalty", "kl_ctrl"))
    if algorithm.kl_ctrl.type == "fixed":
        fields = tuple(set(KLControlConfig.model_fields) - {"type", "kl_coef"})
        why = "with algorithm.kl_ctrl.type=fixed"
        yield from _changed_settings("algorithm.kl_ctrl", algorithm.kl_ctrl, why, fields)


def _unused_for_engine(config: RLConfig) -> UnusedSettings:
    rollout, why = config.rollout, f"with rollout.engine={config.rollout.engine}"
    read = engine_capabilities(rollout).settings
    for field in ENGINE_SETTINGS:
        value = getattr(rollout, field)
        if field in read:
            continue
        if isinstance(value, BaseModel):
            yield from _changed_settings(f"rollout.{field}", value, why)
        else:
            yield from _changed_settings("rollout", rollout, why, (field,))


def _unused_for_mode(config: RLConfig) -> UnusedSettings:
    mode, rollout = config.trainer.mode, config.rollout
    why = f"with trainer.mode={mode}"
    if mode != "async":
        yield from _changed_settings("trainer", config.trainer, why, _ASYNC)
    if not sampler_count(config.trainer):
        yield from _changed_settings(
            "trainer", config.trainer, why, ("rollout_workers", "rollout_threads", "delta_sync")
        )
        yield from _changed_settings("rollout", rollout, why, ("dtype",))


def _unused_for_dataflow(config: RLConfig, dataflow: Dataflow) -> UnusedSettings:
    algorithm = config.algorithm
    if "critic" not in RequiredPasses.of(config, dataflow).roles(dataflow):
        why = f"with dataflow {dataflow.name}, which has no critic"
        yield from _changed_settings("critic", config.critic, why)
        yield from _changed_settings("trainer", config.trainer, why, ("critic_warmup",))
    if not dataflow.pairs:
        why = f"with dataflow {dataflow.name}, which makes no preference pairs"
        yield from _changed_settings("algorithm.preference", algorithm.preference, why)
    if "teacher" not in dataflow.roles:
        why = "without algorithm.dataflow=distillation"
        yield from _changed_settings("algorithm", algorithm, why, ("teacher", "distillation"))
    else:
        yield from unused_distillation(config)
        yield from _unused_by_divergences(config)
    if not algorithm.filter_groups.enable:
        why = "without algorithm.filter_groups.enable"
        if not dataflow.refills:
            yield from _changed_settings("algorithm.filter_groups", algorithm.filter_groups, why)
    elif not dataflow.refills:
        yield "algorithm.filter_groups.enable", f"with dataflow {dataflow.name}; use dapo"
    if effective_config(config).algorithm.rollout_correction.rollout_is is None:
        why, own = "without rollout_is", algorithm.rollout_correction
        yield from _changed_settings("algorithm.rollout_correction", own, why, _WEIGHTS)


def _unused_by_divergences(config: RLConfig) -> UnusedSettings:
    """Settings of policy losses, for distillation that compares distributions."""
    actor, loss = config.actor, config.algorithm.distillation.loss
    if loss == "policy_gradient":
        return
    why = f"with algorithm.distillation.loss={loss}"
    fields = [name for name in _POLICY_LOSS if not name.startswith("loss_")]
    others = ("router_aux_loss_coef", "router_replay")
    yield from _changed_settings("actor", actor, why, (*fields, *others))
    yield from _changed_settings("actor.policy_loss", actor.policy_loss, why)


def _unused_without_advantages(config: RLConfig, dataflow: Dataflow) -> UnusedSettings:
    """Settings of advantages and reward shaping, for a dataflow without advantages."""
    algorithm, why = config.algorithm, f"with dataflow {dataflow.name}, which has no advantages"
    correction = algorithm.rollout_correction
    fields = ("adv_estimator", *ADVANTAGE_FIELDS, "options", "use_kl_in_reward")
    yield from _changed_settings("algorithm", algorithm, why, fields)
    yield from _changed_settings("algorithm.rollout_correction", correction, why)
    yield from _changed_settings("reward", config.reward, why, ("whiten",))


def _unused_with_pairs(config: RLConfig, dataflow: Dataflow) -> UnusedSettings:
    actor, why = config.actor, f"with dataflow {dataflow.name}, whose loss is one of pairs"
    yield from _changed_settings("actor", actor, why, (*_POLICY_LOSS, *_kl_loss(config)))
    yield from _changed_settings("actor.policy_loss", actor.policy_loss, why)


def _unused_for_reward(config: RLConfig, dataflow: Dataflow) -> UnusedSettings:
    algorithm, reward = config.algorithm, config.reward
    if not reward.overlong_buffer.enable:
        why = "without reward.overlong_buffer.enable"
        yield from _changed_settings("reward.overlong_buffer", reward.overlong_buffer, why)
    if "teacher" in dataflow.roles and not dataflow.uses_advantages:
        why = f"with dataflow {dataflow.name}, which learns from its teacher alone"
        yield from _changed_settings("reward", reward, why, ("clip", "overlong_buffer"))
    if algorithm.adv_estimator == "gdpo" and dataflow.uses_advantages:
        why = "with adv_estimator=gdpo, which takes the reward's components as they are"
        yield from _changed_settings("reward", reward, why, ("clip", "whiten", "overlong_buffer"))
        yield from _changed_settings("reward", reward, f"{why} (gdpo_reward_weights)", ("weights",))
        yield from _changed_settings("algorithm", algorithm, why, ("use_kl_in_reward",))


def _kl_loss(config: RLConfig) -> tuple[str, ...]:
    """The settings of a KL term in the loss; a coefficient of 0 turns it off and is no finding."""
    return _KL_LOSS if config.actor.kl_loss_coef else _KL_LOSS[1:]


def _changed_settings(
    section: str, config: BaseModel, why: str, fields: Iterable[str] | None = None
) -> UnusedSettings:
    for field, value in changed(config, fields).items():
        shown = "" if isinstance(value, BaseModel) else f"={value}"
        yield f"{section}.{field}{shown}", why


# Whether the settings of an RL run make sense together; nothing is computed here.


def check_config(config: RLConfig, max_response_length: int | None = None) -> Dataflow:
    """Raise ConfigError for unknown names, contradictions and settings without effect.

    Returns the dataflow that the settings name.
    """
    import_plugins(config.plugins)
    algorithm = config.algorithm
    dataflow = choose_dataflow(algorithm)
    if dataflow.uses_advantages:
        advantages.check_group_size(algorithm.adv_estimator, config.rollout.n)
    if dataflow.pairs:
        _check_pairs(config, dataflow)
    advantage_options(algorithm)
    policy_loss_options(config.actor)
    preference_options(algorithm.preference)
    check_kind(config.actor.kl_loss_type)
    check_kind(algorithm.kl_penalty)
    check_engine_settings(config.rollout)
    _check_rewards(config, max_response_length)
    _check_correction(config)
    _check_mode(config)
    check_multi_turn(config, dataflow)
    _check_pools(config, dataflow)
    if "teacher" in dataflow.roles:
        check_teachers(config)
    if config.critic.model_path and "critic" in dataflow.roles:
        require_model_folder(config.critic.model_path, "critic.model_path")
    for setting, why in unused_settings(config, dataflow):
        raise ConfigError(f"{setting} has no effect {why}; remove it")
    if config.trainer.threads > (os.cpu_count() or 1) * 4:
        raise ConfigError(
            f"trainer.threads={config.trainer.threads} is far more than this machine's "
            f"{os.cpu_count()} cores; set 0 for all of them"
        )
    return dataflow


def check_other_models(
    config: RLConfig, dataflow: Dataflow, tokenizer: PreTrainedTokenizerBase, max_model_len: int
) -> None:
    """Raise ConfigError unless teacher and critic read the policy's tokens, and as many."""
    if "teacher" in dataflow.roles:

        def same_tokens(setting: str, folder: str, why: str) -> None:
            _check_tokens(setting, folder, tokenizer, why)

        check_teacher_tokens(config, max_model_len, same_tokens)
    path = config.critic.model_path
    if path:
        _check_tokens("critic.model_path", path, tokenizer, "it values the policy's tokens")
        context = vocabulary_and_context(path)[1]
        if context < max_model_len:
            raise ConfigError(
                f"critic.model_path={path} reads {context} tokens, and prompt and completion have "
                f"up to {max_model_len}; lower data.max_response_length, or choose another critic"
            )


def _check_tokens(setting: str, path: str, tokenizer: PreTrainedTokenizerBase, why: str) -> None:
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{setting}={path} has another vocabulary than the model; {why}, so both need the same "
            "tokenizer"
        )


def _check_pairs(config: RLConfig, dataflow: Dataflow) -> None:
    if config.rollout.n < 2:
        raise ConfigError(
            f"rollout.n={config.rollout.n} with algorithm.dataflow={dataflow.name}: it compares "
            "the completions of one prompt; set rollout.n to 2 or more"
        )
    if config.actor.ppo_mini_batch_size % 2:
        raise ConfigError(
            f"actor.ppo_mini_batch_size={config.actor.ppo_mini_batch_size} with "
            f"algorithm.dataflow={dataflow.name}: it counts completions, which are learned from in "
            "pairs; set an even number, or 0 for all"
        )


def _check_rewards(config: RLConfig, max_response_length: int | None) -> None:
    reward, buffer = config.reward, config.reward.overlong_buffer
    if reward.clip is not None and reward.clip[0] > reward.clip[1]:
        raise ConfigError(f"reward.clip={list(reward.clip)} is empty; put the lower bound first")
    if buffer.enable and max_response_length is not None and buffer.len > max_response_length:
        raise ConfigError(
            f"reward.overlong_buffer.len={buffer.len} is more than the longest completion of "
            f"{max_response_length} tokens (data.max_response_length); lower it"
        )
    scorer = Scorer(reward, config.plugins)
    scorer.close()
    components = scorer.components
    if config.algorithm.adv_estimator == "gdpo" and components == ():
        raise ConfigError(
            f"algorithm.adv_estimator=gdpo normalises each component of a reward, and "
            f"reward.name={reward.name} has none; choose one with components, such as "
            "answer_and_format"
        )


def _check_mode(config: RLConfig) -> None:
    mode, engine, parts = config.trainer.mode, config.rollout.engine, config.rollout.parts
    streams = engine_capabilities(config.rollout).streams
    if mode == "async" and not streams:
        raise ConfigError(
            f"trainer.mode=async with rollout.engine={engine}, which decodes whole batches and "
            "can't stream; use native, vllm or server, or trainer.mode=one_step_off"
        )
    remote = engine_capabilities(config.rollout).remote
    if mode == "async" and remote and config.rollout.server.weights == "none":
        raise ConfigError(
            "trainer.mode=async with rollout.server.weights=none: completions of a policy that "
            "never changes get too old (trainer.staleness); choose a hook that brings new weights"
        )
    if parts > 1 and (sampler_count(config.trainer) or not streams):
        raise ConfigError(
            f"rollout.parts={parts} needs trainer.mode=sync and an engine that streams, such as "
            "rollout.engine=native; leave it at 1"
        )
    if get_rollout_source(mode).off_policy and config.actor.old_log_probs == "rollout":
        raise ConfigError(
            f"actor.old_log_probs=rollout with trainer.mode={mode}: completions are of older "
            "weights, so the trainer's own log-probs are needed; set old_log_probs to auto"
        )


def _check_pools(config: RLConfig, dataflow: Dataflow) -> None:
    pools = config.trainer.pools
    if not pools:
        return
    source = get_rollout_source(config.trainer.mode)
    wanted = RequiredPasses.of(config, dataflow).roles(dataflow) | source.extra_roles
    placed = [role for pool in pools for role in pool.roles]
    if sampler_count(config.trainer) and "sampler" in placed:
        wanted |= {"sampler"}  # async has processes of that kind, and no role
        apart = next(pool.roles for pool in pools if "sampler" in pool.roles)
        if len(apart) > 1:
            raise ConfigError(
                f"trainer.pools puts sampler into one pool with {sorted(set(apart) - {'sampler'})}"
                "; it decodes while they compute, so give it a pool of its own"
            )
    if set(placed) != wanted or len(placed) != len(set(placed)):
        raise ConfigError(
            f"trainer.pools places {sorted(placed)}, but this run has {sorted(wanted)}; give each "
            "of them one pool"
        )
    full = config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full"
    beside = {"rollout": True, "reference": full or config.actor.kl_loss_type == "full"}
    beside["teacher"] = compares_whole_vocabularies(config)
    policy = next(pool.roles for pool in pools if "actor" in pool.roles)
    for role, needed in beside.items():
        if needed and role in placed and role not in policy:
            raise ConfigError(
                f"trainer.pools puts {role} apart from actor, whose weights it reads in place; put "
                "both into one pool"
                + (" (trainer.mode=one_step_off samples apart)" if role == "rollout" else "")
            )


def _check_correction(config: RLConfig) -> None:
    settings = config.algorithm.rollout_correction
    check_correction(
        settings.rollout_is,
        settings.rollout_is_threshold,
        settings.rollout_rs,
        settings.rollout_rs_threshold,
    )
    if settings.enabled and config.actor.old_log_probs == "rollout":
        raise ConfigError(
            "actor.old_log_probs=rollout with algorithm.rollout_correction: the correction "
            "compares the trainer's log-probs with those of sampling; set old_log_probs to auto"
        )
