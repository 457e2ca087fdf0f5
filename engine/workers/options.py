"""From the configuration's fields to the options that a registered algorithm reads.

verl keeps the options of all policy losses side by side in one section. An entry gets those it
reads; a field that was changed from its default and that the entry does not read is an error, so
that no setting is silently without effect.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from engine.algorithms import advantages, losses
from engine.config import ActorConfig, AlgorithmConfig
from engine.errors import ConfigError

_LOSS_FIELDS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
_ADVANTAGE_FIELDS = ("gamma", "lam", "norm_adv_by_std_in_grpo")


def policy_loss_options(config: ActorConfig) -> dict[str, Any]:
    """Options of `actor.policy_loss.loss_mode`; raise ConfigError for one without effect."""
    name = config.policy_loss.loss_mode
    read = losses.options(name)
    options = _chosen(config, "actor", _LOSS_FIELDS, name, set(read))
    losses.get_policy_loss(name).check_options(options)
    losses.aggregation_mode(name, config.loss_agg_mode)
    return options


def advantage_options(config: AlgorithmConfig) -> dict[str, Any]:
    """Options of `algorithm.adv_estimator`; raise ConfigError for one without effect."""
    name = config.adv_estimator
    read = advantages.options(name)
    return _chosen(config, "algorithm", _ADVANTAGE_FIELDS, name, set(read))


def _chosen(
    config: BaseModel, section: str, fields: tuple[str, ...], name: str, read: set[str]
) -> dict[str, Any]:
    """The fields that differ from their defaults; the entry's own defaults stand for the rest."""
    changed = {
        field: getattr(config, field)
        for field in fields
        if getattr(config, field) != type(config).model_fields[field].default
    }
    for field, value in changed.items():
        if field not in read:
            raise ConfigError(
                f"{section}.{field}={value} has no effect: {name!r} doesn't read it (it reads "
                f"{', '.join(sorted(read)) or 'no options'}); remove it"
            )
    return changed
