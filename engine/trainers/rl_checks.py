"""Whether the settings of an RL run make sense together; nothing is computed here."""

from __future__ import annotations

import os

from transformers import PreTrainedTokenizerBase

from engine.algorithms import advantages
from engine.algorithms.correction import check_correction
from engine.algorithms.kl import check_kind
from engine.config import RLConfig
from engine.data.tokenizer import load_tokenizer
from engine.dataflows import choose_dataflow
from engine.dataflows.registry import Dataflow
from engine.dataflows.required_passes import RequiredPasses
from engine.errors import ConfigError
from engine.models import require_model_folder, vocabulary_and_context
from engine.plugins import import_plugins
from engine.rewards import Scorer
from engine.rollout.protocol import check_engine_settings, engine_capabilities
from engine.trainers.distillation_checks import (
    check_teacher_tokens,
    check_teachers,
    compares_whole_vocabularies,
)
from engine.trainers.multi_turn_checks import check_multi_turn
from engine.trainers.rollout_sources import get_rollout_source, sampler_count
from engine.trainers.unused_settings import unused_settings
from engine.workers.algorithm_options import (
    advantage_options,
    policy_loss_options,
    preference_options,
)


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
