"""`plan_run` checks and resolves an RL run's settings: they become the `RunSpec` it is built from.

`check_config` has the checks that need no model and no machines: whether settings make sense
together, and which have no effect.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from pydantic import BaseModel

from engine import models
from engine.agents.agent_runner import check_agent
from engine.agents.environment_protocol import environment_class
from engine.algorithms import advantages
from engine.algorithms.correction import check_correction
from engine.algorithms.divergences import check_kind
from engine.config import LoRAConfig, RLConfig, TeacherConfig
from engine.data.tokenizer import load_tokenizer
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import Dataflow, RequiredPasses
from engine.errors import ConfigError
from engine.registry import import_plugins
from engine.rewards import Scorer
from engine.rewards.answers import ENVIRONMENT
from engine.rollout.protocol import ENGINE_SETTINGS, check_engine_settings, engine_capabilities
from engine.trainers import run_spec
from engine.trainers.auto_placement import model_dtype, resolve_auto
from engine.trainers.layout_checks import check_layouts
from engine.workers import algorithm_options


def plan_run(
    config: RLConfig,
    *,
    model_path: str,
    max_response_length: int,
    max_model_len: int,
    seed: int = 0,
    dtype: str = "auto",
    lora: LoRAConfig | None = None,
    template_variables: Mapping[str, object] | None = None,
) -> run_spec.RunSpec:
    """Check a run, and resolve what its settings leave open: placement, layout, dtype, adapters.

    Raises ConfigError for settings or a model that make no run, PlacementError where no layout
    fits the machines. Nothing is started but Ray, which `trainer.placement=auto` asks for machines.
    """
    dataflow = check_config(config, max_response_length)
    config = run_spec.resolve_placement(config)
    lora = models.resolve_lora(model_path, lora or LoRAConfig())
    run_spec.check_lora(lora, config)
    dtype = model_dtype(dtype, model_path, config)
    config = resolve_auto(
        config,
        model_path=model_path,
        lora=lora,
        dtype=dtype,
        max_response_length=max_response_length,
        max_model_len=max_model_len,
    )
    check_layouts(config, lora, models.text_config(model_path))
    context = models.vocabulary_and_context(model_path)[1]
    models.check_context(max_model_len - max_response_length, max_response_length, context)
    _check_other_models(config, dataflow, model_path, max_model_len)
    needs, roles = run_spec.run_roles(config)
    spec = run_spec.RunSpec(
        model_path,
        run_spec.effective_config(config),
        needs,
        roles,
        max_response_length,
        max_model_len,
        seed,
        dtype,
        lora,
        template_variables or {},
    )
    run_spec.broadcast_backend(spec)
    return spec


def check_config(config: RLConfig, max_response_length: int | None = None) -> Dataflow:
    """Return the dataflow; ConfigError for contradictions and settings without effect."""
    import_plugins(config.plugins)
    algorithm = config.algorithm
    dataflow = choose_dataflow(algorithm)
    if dataflow.uses_advantages:
        advantages.check_group_size(algorithm.adv_estimator, config.rollout.n)
    if dataflow.pairs:
        _check_pairs(config, dataflow)
    algorithm_options.advantage_options(algorithm)
    algorithm_options.policy_loss_options(config.actor)
    algorithm_options.preference_options(algorithm.preference)
    check_kind(config.actor.kl_loss_type)
    check_kind(algorithm.kl_penalty)
    check_engine_settings(config.rollout)
    _check_rewards(config, max_response_length)
    correction = algorithm.rollout_correction
    fields = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
    check_correction(*attrgetter(*fields)(correction))
    _check_mode(config)
    _check_multi_turn(config, dataflow)
    _check_pools(config, dataflow)
    if "teacher" in dataflow.roles:
        _check_teachers(config)
    if config.critic.model_path and "critic" in dataflow.roles:
        models.require_model_folder(config.critic.model_path, "critic.model_path")
    for setting, why in unused_settings(config, dataflow):
        raise ConfigError(f"{setting} has no effect {why}; remove it")
    if config.trainer.threads > (os.cpu_count() or 1) * 4:
        raise ConfigError(
            f"trainer.threads={config.trainer.threads} is far more than this machine's "
            f"{os.cpu_count()} cores; set 0 for all of them"
        )
    return dataflow


_BY_TOKEN = "distillation compares token by token"
_SERVED = tuple(
    name for name in TeacherConfig.model_fields if name not in ("model", "url", "weight", "rows")
)


def _check_teachers(config: RLConfig) -> None:
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
    for i, teacher in enumerate(settings.teachers):
        if teacher.url:
            _check_served(config, f"algorithm.distillation.teachers[{i}].url={teacher.url}")
    parallel = config.actor.parallel
    if settings.loss != "policy_gradient" and (parallel.tp > 1 or parallel.pp > 1):
        raise ConfigError(
            f"algorithm.distillation.loss={settings.loss} with actor.parallel.tp={parallel.tp} and "
            f"pp={parallel.pp}: it needs all logits of a token in one place; set both to 1 (dp, "
            "fsdp and sp go), or take loss=policy_gradient"
        )
    for setting, path in algorithm.teacher_models.items():
        models.require_model_folder(path, setting)


def _compares_whole_vocabularies(config: RLConfig) -> bool:
    """Whether student and teachers meet in one process."""
    settings = config.algorithm.distillation
    return settings.loss != "policy_gradient" and not settings.top_k


def _check_served(config: RLConfig, setting: str) -> None:
    if _compares_whole_vocabularies(config):
        raise ConfigError(
            f"{setting} with top_k=0: a server gives log-probs of the likeliest tokens alone; set "
            "algorithm.distillation.top_k, to 16 for instance"
        )
    if config.rollout.temperature != 1:
        raise ConfigError(
            f"{setting} with rollout.temperature={config.rollout.temperature}: a server gives "
            "log-probs at temperature 1; set rollout.temperature=1"
        )


# Estimators that take an episode of several rows as one completion.
_OF_EPISODES = ("gae_turn", "grpo", "grpo_passk", "grpo_turn", "gpg", "maxrl", "rloo")


def _check_multi_turn(config: RLConfig, dataflow: Dataflow) -> None:
    agent = config.rollout.agent
    environment = agent.environment.name
    if not config.rollout.multi_turn.enable:
        if config.reward.name == ENVIRONMENT:
            raise ConfigError(
                "reward.name=environment is what an episode's environment gives; set "
                "rollout.multi_turn.enable=true and rollout.agent.environment.name, or name another"
            )
        return
    if agent.play.name:
        check_agent(agent.play.name, agent.play.options)
    elif environment:
        environment_class(environment)
    else:
        raise ConfigError(
            "rollout.multi_turn.enable needs rollout.agent.environment.name, a registered "
            "environment or package.module:Class, or rollout.agent.play, an agent; set one"
        )
    for setting, advice in _refused(config, dataflow):
        raise ConfigError(f"{setting} doesn't go with rollout.multi_turn.enable; {advice}")


def _refused(config: RLConfig, dataflow: Dataflow) -> Iterator[tuple[str, str]]:
    """Settings that episodes don't go with, and what to set."""
    rollout, capabilities = config.rollout, engine_capabilities(config.rollout)
    engine = f"rollout.engine={rollout.engine}"
    if not capabilities.streams:
        yield engine, "turns are decoded in a stream: use native, vllm or server"
    if (tp := rollout.tensor_parallel_size) > 1 and not capabilities.own_processes:
        apart = ", or rollout.vllm.in_process=false" if capabilities.loads_shards else ""
        advice = f"turns are decoded on one rank each: set it to 1{apart}"
        yield f"rollout.tensor_parallel_size={tp}", advice
    if rollout.agent.turn_timeout_s is not None and not capabilities.cuts:
        advice = "it answers whole turns: limit them by rollout.multi_turn.max_turn_length"
        yield f"rollout.agent.turn_timeout_s with {engine}", advice
    if rollout.enable_rollout_routing_replay:
        yield "rollout.enable_rollout_routing_replay", "remove it"
    if config.reward.overlong_buffer.enable:
        advice = "limit turns by rollout.multi_turn.max_assistant_turns"
        yield "reward.overlong_buffer.enable", advice
    estimator, name = config.algorithm.adv_estimator, dataflow.name
    joins = name in ("grpo", "ppo") and estimator in _OF_EPISODES
    if rollout.agent.play.name and not joins:
        advice = f"an agent's episode may have branches: choose one of {', '.join(_OF_EPISODES)}"
        yield f"algorithm.adv_estimator={estimator} and dataflow {name} with an agent", advice
    elif rollout.multi_turn.history == "branches" and not joins:
        setting = "rollout.multi_turn.history=branches with algorithm.adv_estimator="
        advice = f"choose one of {', '.join(_OF_EPISODES)}, or history=append"
        yield f"{setting}{estimator} and dataflow {name}", advice


_KL_LOSS = ("actor.kl_loss_coef", "actor.kl_loss_type")
_KL_SCHEDULE = [f"algorithm.kl_ctrl.{name}" for name in ("horizon", "target_kl")]
_LOSS_OF_ADVANTAGES = (
    *(f"actor.{name}" for name in algorithm_options.ACTOR_FIELDS),
    "actor.entropy_coeff",
    "actor.old_log_probs",
    "actor.policy_loss.*",
)
_AGGREGATION = ("actor.loss_agg_mode", "actor.loss_scale_factor")
_ADVANTAGES = (
    "algorithm.adv_estimator",
    *(f"algorithm.{name}" for name in algorithm_options.ADVANTAGE_FIELDS),
    "algorithm.options",
    "algorithm.use_kl_in_reward",
    "algorithm.rollout_correction.*",
    "reward.whiten",
)


def unused_settings(config: RLConfig, dataflow: Dataflow) -> Iterator[tuple[str, str]]:
    for unread, why, settings in _unread_settings(config, dataflow):
        for setting in settings if unread else ():
            path, _, field = setting.rpartition(".")
            fields = None if field == "*" else (field,)
            for name, value in algorithm_options.changed(attrgetter(path)(config), fields).items():
                shown = "" if isinstance(value, BaseModel) else f"={value}"
                yield f"{path}.{name}{shown}", why
    if config.algorithm.filter_groups.enable and not dataflow.refills:
        yield "algorithm.filter_groups.enable", f"with dataflow {dataflow.name}; use dapo"
    if "teacher" in dataflow.roles:
        yield from _unused_distillation(config)


def _unread_settings(
    config: RLConfig, dataflow: Dataflow
) -> Iterator[tuple[bool, str, Iterable[str]]]:
    """Whether the run lacks a part, why, and the settings (`section.*`: all) it would read."""
    algorithm, actor, rollout = config.algorithm, config.actor, config.rollout
    reward, trainer, name = config.reward, config.trainer, dataflow.name

    # A coefficient of 0 turns the KL term off.
    kl_loss = _KL_LOSS if actor.kl_loss_coef else _KL_LOSS[1:]
    yield not actor.use_kl_loss, "without actor.use_kl_loss", kl_loss
    why = "without algorithm.use_kl_in_reward"
    yield not algorithm.use_kl_in_reward, why, ["algorithm.kl_penalty", "algorithm.kl_ctrl"]
    why = "with algorithm.kl_ctrl.type=fixed"
    yield algorithm.kl_ctrl.type == "fixed", why, _KL_SCHEDULE

    unread = [f for f in ENGINE_SETTINGS if f not in engine_capabilities(rollout).settings]
    sections = [f for f in unread if isinstance(getattr(rollout, f), BaseModel)]
    engine = [f"rollout.{f}.*" if f in sections else f"rollout.{f}" for f in unread]
    yield True, f"with rollout.engine={rollout.engine}", engine

    why = f"with trainer.mode={trainer.mode}"
    queue = ("staleness", "rollout_silence_s", "max_rollout_restarts", "weight_transfer")
    ahead = [*(f"trainer.{field}" for field in queue), "rollout.kv_on_update"]
    yield trainer.mode != "async", why, ahead
    workers = ("trainer.rollout_workers", "trainer.rollout_threads", "trainer.delta_sync")
    yield not run_spec.sampler_count(trainer), why, [*workers, "rollout.dtype"]

    critic = "critic" in RequiredPasses.of(config, dataflow).roles(dataflow)
    why = f"with dataflow {name}, which has no critic"
    yield not critic, why, ["critic.*", "trainer.critic_warmup"]
    why = f"with dataflow {name}, which makes no preference pairs"
    yield not dataflow.pairs, why, ["algorithm.preference.*"]
    teacher, why = "teacher" in dataflow.roles, "without algorithm.dataflow=distillation"
    yield not teacher, why, ["algorithm.teacher", "algorithm.distillation"]
    compares = teacher and algorithm.distillation.loss != "policy_gradient"
    why = f"with algorithm.distillation.loss={algorithm.distillation.loss}"
    routers = ("actor.router_aux_loss_coef", "actor.router_replay")
    yield compares, why, [*_LOSS_OF_ADVANTAGES, *routers]
    unfiltered = not algorithm.filter_groups.enable and not dataflow.refills
    why = "without algorithm.filter_groups.enable"
    yield unfiltered, why, ["algorithm.filter_groups.*"]
    correction = run_spec.effective_config(config).algorithm.rollout_correction
    fields = ("rollout_is_threshold", "rollout_is_batch_normalize")
    weights = [f"algorithm.rollout_correction.{field}" for field in fields]
    yield correction.rollout_is is None, "without rollout_is", weights
    why = f"with dataflow {name}, which has no advantages"
    yield not dataflow.uses_advantages, why, _ADVANTAGES
    masks = dataflow.uses_advantages or dataflow.pairs
    yield not masks, why, ["algorithm.mask_truncated"]
    why = f"with dataflow {name}, whose loss is one of pairs"
    yield dataflow.pairs, why, [*_LOSS_OF_ADVANTAGES, *_AGGREGATION, *kl_loss]

    why = "without reward.overlong_buffer.enable"
    yield not reward.overlong_buffer.enable, why, ["reward.overlong_buffer.*"]
    measures = teacher and not dataflow.uses_advantages
    why = f"with dataflow {name}, which learns from its teacher alone"
    yield measures, why, ["reward.clip", "reward.overlong_buffer"]
    components = algorithm.adv_estimator == "gdpo" and dataflow.uses_advantages
    why = "with adv_estimator=gdpo, which takes the reward's components as they are"
    yield components, why, ["reward.clip", "reward.whiten", "reward.overlong_buffer"]
    yield components, f"{why} (gdpo_reward_weights)", ["reward.weights"]
    yield components, why, ["algorithm.use_kl_in_reward"]
    why = "without rollout.multi_turn.enable"
    yield not rollout.multi_turn.enable, why, ["rollout.multi_turn.*", "rollout.agent.*"]
    why = "without rollout.val_kwargs.do_sample"
    yield not rollout.val_kwargs.do_sample, why, ["rollout.val_kwargs.*"]
    why = "with trainer.log_rollouts_freq=0"
    yield not trainer.log_rollouts_freq, why, ["trainer.log_rollouts_rows"]


def _unused_distillation(config: RLConfig) -> Iterator[tuple[str, str]]:
    settings, section = config.algorithm.distillation, "algorithm.distillation"
    if settings.loss != "jsd" and settings.beta != 0.5:
        yield f"{section}.beta={settings.beta}", f"with loss={settings.loss}"
    if settings.loss == "policy_gradient" and settings.top_k:
        yield f"{section}.top_k={settings.top_k}", "with loss=policy_gradient"
    for i, teacher in enumerate(settings.teachers):
        name = f"{section}.teachers[{i}]"
        if settings.route_by and teacher.weight != 1:
            yield f"{name}.weight={teacher.weight}", "with route_by: a row has one teacher"
        for field, value in algorithm_options.changed(
            teacher, () if teacher.url else _SERVED
        ).items():
            yield f"{name}.{field}={value}", "without url"


def _check_other_models(
    config: RLConfig, dataflow: Dataflow, model_path: str, max_model_len: int
) -> None:
    """Raise ConfigError unless teachers and critic read the policy's tokens, and as many."""
    teachers = config.algorithm.teacher_models if "teacher" in dataflow.roles else {}
    others = [(setting, path, _BY_TOKEN, "teacher") for setting, path in teachers.items()]
    if path := config.critic.model_path:
        others.append(("critic.model_path", path, "it values the policy's tokens", "critic"))
    for setting, path, why, kind in others:
        _check_tokens(setting, path, model_path, why)
        context = models.vocabulary_and_context(path)[1]
        if context < max_model_len:
            raise ConfigError(
                f"{setting}={path} reads {context} tokens, and prompt and completion have up to "
                f"{max_model_len}; lower data.max_response_length, or choose another {kind}"
            )
    for i, teacher in enumerate(config.algorithm.distillation.teachers):
        if teacher.tokenizer:
            setting = f"algorithm.distillation.teachers[{i}].tokenizer"
            _check_tokens(setting, teacher.tokenizer, model_path, _BY_TOKEN)


def _check_tokens(setting: str, path: str, model_path: str, why: str) -> None:
    if load_tokenizer(path).get_vocab() != load_tokenizer(model_path).get_vocab():
        raise ConfigError(
            f"{setting}={path} has another vocabulary than the model; {why}, so both need the same "
            "tokenizer"
        )


def _check_pairs(config: RLConfig, dataflow: Dataflow) -> None:
    n, size = config.rollout.n, config.actor.ppo_mini_batch_size
    if n < 2:
        raise ConfigError(
            f"rollout.n={n} with algorithm.dataflow={dataflow.name}: it compares the completions "
            "of one prompt; set rollout.n to 2 or more"
        )
    if size % 2:
        raise ConfigError(
            f"actor.ppo_mini_batch_size={size} with algorithm.dataflow={dataflow.name}: it learns "
            "from pairs of completions; set an even number, or 0 for all"
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
    if config.algorithm.adv_estimator == "gdpo" and scorer.components == ():
        raise ConfigError(
            "algorithm.adv_estimator=gdpo normalises each component of a reward, and "
            f"reward.name={reward.name} has none; choose one such as answer_and_format"
        )


def _check_mode(config: RLConfig) -> None:
    mode, engine, parts = config.trainer.mode, config.rollout.engine, config.rollout.parts
    capabilities = engine_capabilities(config.rollout)
    if mode == "async" and not capabilities.streams:
        raise ConfigError(
            f"trainer.mode=async with rollout.engine={engine}, which decodes whole batches and "
            "can't stream; use native, vllm or server, or trainer.mode=one_step_off"
        )
    if mode == "async" and capabilities.remote and config.rollout.server.weights == "none":
        raise ConfigError(
            "trainer.mode=async with rollout.server.weights=none: completions get too old "
            "(trainer.staleness); choose a hook that brings new weights"
        )
    if parts > 1 and (run_spec.sampler_count(config.trainer) or not capabilities.streams):
        raise ConfigError(
            f"rollout.parts={parts} needs trainer.mode=sync and an engine that streams, such as "
            "rollout.engine=native; leave it at 1"
        )
    needed_by = ""
    if run_spec.rollout_source(config.trainer).off_policy:
        needed_by = f"trainer.mode={mode}"
    elif config.algorithm.rollout_correction.enabled:
        needed_by = "algorithm.rollout_correction"
    if needed_by and config.actor.old_log_probs == "rollout":
        raise ConfigError(
            f"actor.old_log_probs=rollout with {needed_by}, which needs the trainer's own "
            "log-probs; set old_log_probs to auto"
        )


def _check_pools(config: RLConfig, dataflow: Dataflow) -> None:
    pools = config.trainer.pools
    if not pools:
        return
    _, roles = run_spec.run_roles(config)
    placed = [role for pool in pools for role in pool.roles]
    samplers = run_spec.sampler_count(config.trainer)
    if samplers and "sampler" in placed:
        roles |= {"sampler"}  # async has processes of that kind, and no role
        apart = next(pool.roles for pool in pools if "sampler" in pool.roles)
        if len(apart) > 1:
            raise ConfigError(
                f"trainer.pools puts sampler into one pool with {sorted(set(apart) - {'sampler'})}"
                "; it decodes while they compute, so give it a pool of its own"
            )
    if sorted(placed) != sorted(roles):
        raise ConfigError(
            f"trainer.pools places {sorted(placed)}, but this run has {sorted(roles)}; give each "
            "of them one pool" + (f" (mode={config.trainer.mode}: no rollout)" if samplers else "")
        )
    full = config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full"
    beside = {"rollout": True, "reference": full or config.actor.kl_loss_type == "full"}
    beside["teacher"] = _compares_whole_vocabularies(config)
    policy = next(pool.roles for pool in pools if "actor" in pool.roles)
    for role, needed in beside.items():
        if needed and role in placed and role not in policy:
            other = " (trainer.mode=one_step_off samples apart)" if role == "rollout" else ""
            raise ConfigError(
                f"trainer.pools puts {role} apart from actor, whose weights it reads in place; put "
                f"both into one pool{other}"
            )
