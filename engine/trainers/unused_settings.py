"""Settings that were changed from their defaults but have no effect with the others.

They are refused, so that nobody tunes a setting that nothing reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from engine.config import KLControlConfig, RLConfig
from engine.dataflows.registry import Dataflow
from engine.dataflows.required_passes import RequiredPasses
from engine.rollout.protocol import ENGINE_SETTINGS, engine_capabilities
from engine.trainers.distillation_checks import unused_distillation
from engine.trainers.rl_setup import effective_config
from engine.trainers.rollout_sources import sampler_count
from engine.workers.algorithm_options import ACTOR_FIELDS, ADVANTAGE_FIELDS, changed

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
