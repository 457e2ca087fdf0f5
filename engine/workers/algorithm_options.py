"""Converts configuration fields to the options of a registered algorithm.

As in verl, one section has the options of all policy losses. An algorithm gets those it reads; a
changed field that it does not read is an error, so that no setting is silently ignored. A plugin's
algorithm declares its options, and takes them from a section's `options`.
"""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from engine.algorithms import advantages, policy_losses, preference_losses
from engine.config import (
    ActorConfig,
    AlgorithmConfig,
    PolicyLossConfig,
    PreferenceConfig,
    PreferenceTrainingConfig,
)
from engine.errors import ConfigError
from engine.registry import Options

_CLIP_FIELDS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
ACTOR_FIELDS = (*_CLIP_FIELDS, "tau_pos", "tau_neg")
_LOSS_FIELDS = tuple(
    name for name in PolicyLossConfig.model_fields if name not in ("loss_mode", "options")
)
ADVANTAGE_FIELDS = (
    "gamma",
    "lam",
    "whiten",
    "norm_adv_by_std_in_grpo",
    "epsilon",
    "f_norm",
    "gdpo_reward_weights",
    "turn_weight",
    "handle_zero_tail",
)
_PREFERENCE_FIELDS = tuple(
    name for name in PreferenceConfig.model_fields if name not in ("loss", "options")
)

_KTO_FIELDS = ("desirable_weight", "undesirable_weight")


def policy_loss_options(config: ActorConfig) -> dict[str, object]:
    """Options of `actor.policy_loss.loss_mode`; raise ConfigError for an unused one."""
    loss, section, name = config.policy_loss, "actor.policy_loss", config.policy_loss.loss_mode
    read = policy_losses.options(name)
    options = _changed_options(config, "actor", ACTOR_FIELDS, name, read)
    for option in loss.options.keys() & {*ACTOR_FIELDS}:
        raise ConfigError(f"{section}.options.{option} is a setting of its own; set actor.{option}")
    options |= _section_options(loss, section, _LOSS_FIELDS, name, read)
    policy_losses.get_policy_loss(name).check_options(options)
    mode = policy_losses.aggregation_mode(name, config.loss_agg_mode)
    if config.loss_scale_factor is not None and mode != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"actor.loss_scale_factor={config.loss_scale_factor} has no effect with "
            f"loss_agg_mode={mode}; set loss_agg_mode to seq-mean-token-sum-norm, or remove it"
        )
    return options


def advantage_options(config: AlgorithmConfig) -> dict[str, object]:
    """Options of `algorithm.adv_estimator`; raise ConfigError for an unused one."""
    read = advantages.options(config.adv_estimator)
    return _section_options(config, "algorithm", ADVANTAGE_FIELDS, config.adv_estimator, read)


def preference_options(
    config: PreferenceConfig, section: str = "algorithm.preference"
) -> dict[str, Any]:
    """Options of the `loss` of a section; raise ConfigError for an unused one."""
    read = preference_losses.options(config.loss)
    options = _section_options(config, section, _PREFERENCE_FIELDS, config.loss, read)
    preference_losses.get_pair_loss(config.loss).check_options(options)
    return options


def kto_options(config: PreferenceTrainingConfig) -> dict[str, float]:
    """Options of KTO from the section `preference`; raise ConfigError for an unused one."""
    fields = (*_PREFERENCE_FIELDS, *_KTO_FIELDS)
    if config.options:
        raise ConfigError("preference.options are a loss's of your own; remove them for loss=kto")
    return _changed_options(config, "preference", fields, "kto", ("beta", *_KTO_FIELDS))


def check_preference_training(config: PreferenceTrainingConfig) -> None:
    """Raise ConfigError for options of the section `preference` that its loss doesn't read."""
    if config.loss == "kto":
        kto_options(config)
        return
    read = preference_losses.options(config.loss)
    preference_options(config, "preference")
    _changed_options(config, "preference", _KTO_FIELDS, config.loss, read)


def _section_options(
    config: AlgorithmConfig | PolicyLossConfig | PreferenceConfig,
    section: str,
    fields: tuple[str, ...],
    name: str,
    read: Options,
) -> dict[str, Any]:
    """A section's changed fields and its `options`; one that is also a field is an error."""
    for option in config.options.keys() & {*fields}:
        setting = f"{section}.{option}"
        raise ConfigError(f"{section}.options.{option} is a setting of its own; set {setting}")
    options = _changed_options(config, section, fields, name, read)
    return options | read.parse(config.options, f"{section}.options")


def changed(config: BaseModel, fields: Iterable[str] | None = None) -> dict[str, object]:
    """The fields of a section whose values differ from their defaults."""
    known = type(config).model_fields
    return {
        field: getattr(config, field)
        for field in (known if fields is None else fields)
        if getattr(config, field) != known[field].get_default(call_default_factory=True)
    }


def _changed_options(
    config: BaseModel, section: str, fields: tuple[str, ...], name: str, read: Iterable[str]
) -> dict[str, Any]:
    """The fields that differ from their defaults; for others the algorithm's own defaults apply."""
    options = changed(config, fields)
    for field, value in options.items():
        if field not in read:
            raise ConfigError(
                f"{section}.{field}={value} has no effect: {name!r} doesn't read it (it reads "
                f"{', '.join(sorted(read)) or 'no options'}); remove it"
            )
    return options
