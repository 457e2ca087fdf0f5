"""Settings reach the algorithm that reads them; one that nothing reads is refused."""

from __future__ import annotations

import pytest
import torch

from engine.algorithms import advantages, policy_losses, preference_losses
from engine.config import ActorConfig, AlgorithmConfig, PolicyLossConfig, PreferenceConfig
from engine.errors import ConfigError
from engine.workers.algorithm_options import (
    advantage_options,
    policy_loss_options,
    preference_options,
)


def actor(loss_mode: str = "vanilla", **changes: object) -> ActorConfig:
    return ActorConfig.model_validate({"policy_loss": {"loss_mode": loss_mode}} | changes)


def clip_bounds(config: ActorConfig) -> tuple[float, float]:
    """Where the configured loss stops rewarding a larger ratio, and a smaller one."""
    grid = torch.linspace(0.02, 2.5, 249)[None]
    log_ratio, mask = grid.log(), torch.ones_like(grid)
    loss = policy_losses.get_policy_loss(config.policy_loss.loss_mode)
    options = policy_loss_options(config)
    up = -loss(log_ratio, torch.zeros_like(grid), mask, mask, **options).loss
    down = -loss(log_ratio, torch.zeros_like(grid), -mask, mask, **options).loss
    return float(1 + down.max()), float(up.max() - 1)


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [
        ({}, 0.2, 0.2),
        ({"clip_ratio": 0.3}, 0.3, 0.3),
        ({"clip_ratio": 0.3, "clip_ratio_low": 0.1}, 0.1, 0.3),
        ({"clip_ratio_high": 0.28}, 0.2, 0.28),
        ({"clip_ratio_low": 0.1, "clip_ratio_high": 0.4}, 0.1, 0.4),
    ],
)
def test_clip_ratio_sets_each_bound_that_is_not_given(
    changes: dict[str, float], low: float, high: float
) -> None:
    found = clip_bounds(actor(**changes))
    # -A·clip(ratio, 1-low, …) with A < 0 is flat below 1-low: its best value is -(1-low).
    assert found == pytest.approx((low, high), abs=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (actor("reinforce", clip_ratio=0.1), r"actor.clip_ratio=0.1 has no effect: 'reinforce'"),
        (actor("sapo", clip_ratio_high=0.1), r"actor.clip_ratio_high=0.1 .*tau_neg, tau_pos"),
        (actor("gspo", clip_ratio_c=4.0), "actor.clip_ratio_c=4.0 has no effect"),
        (actor("vanila"), "policy_loss.loss_mode='vanila' is unknown .*'vanilla'"),
        (actor(loss_agg_mode="mean"), "loss_agg_mode='mean' is unknown"),
    ],
)
def test_a_policy_setting_without_effect_is_refused(config: ActorConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_loss_options(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adv_estimator": "grpo", "gamma": 0.9}, "algorithm.gamma=0.9 has no effect: 'grpo'"),
        ({"adv_estimator": "grpo", "lam": 0.9}, "algorithm.lam=0.9 has no effect"),
        ({"adv_estimator": "rloo", "norm_adv_by_std_in_grpo": False}, "has no effect: 'rloo'"),
        ({"adv_estimator": "gea"}, "algorithm.adv_estimator='gea' is unknown .*'gae'"),
    ],
)
def test_an_advantage_setting_without_effect_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        advantage_options(AlgorithmConfig.model_validate(changes))


def test_settings_reach_the_estimator() -> None:
    config = AlgorithmConfig(adv_estimator="gae", gamma=0.9, lam=0.5)
    assert advantage_options(config) == {"gamma": 0.9, "lam": 0.5}
    dr = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    assert advantage_options(dr) == {"norm_adv_by_std_in_grpo": False}


@pytest.mark.parametrize("name", advantages.names())
def test_every_option_of_an_estimator_is_a_setting(name: str) -> None:
    """A default isn't passed on, so it is None there, or equal to the estimator's own."""
    fields = AlgorithmConfig.model_fields
    for option, default in advantages.options(name).items():
        assert fields[option].default in (None, default), option


@pytest.mark.parametrize("name", policy_losses.names())
def test_every_option_of_a_loss_is_a_setting(name: str) -> None:
    fields = ActorConfig.model_fields | PolicyLossConfig.model_fields
    for option in policy_losses.options(name):
        assert fields[option].default is None, option


@pytest.mark.parametrize("name", preference_losses.names())
def test_every_option_of_a_pair_loss_is_a_setting(name: str) -> None:
    for option in preference_losses.options(name):
        assert PreferenceConfig.model_fields[option].default is None, option
    assert preference_options(PreferenceConfig(loss=name)) == {}


def test_pair_settings() -> None:
    given = PreferenceConfig(loss="simpo", beta=3.0, simpo_gamma=0.1)
    assert preference_options(given) == {"beta": 3.0, "simpo_gamma": 0.1}
    with pytest.raises(ConfigError, match=r"algorithm\.preference\.simpo_gamma=0\.1 has no effect"):
        preference_options(PreferenceConfig(simpo_gamma=0.1))


def test_loss_settings_of_both_sections() -> None:
    config = actor("sapo", tau_pos=2.0)
    assert policy_loss_options(config) == {"tau_pos": 2.0}
    section = {"loss_mode": "clip_cov", "clip_cov_ub": 9.0}
    config = ActorConfig.model_validate({"policy_loss": section, "clip_ratio": 0.1})
    assert policy_loss_options(config) == {"clip_ratio": 0.1, "clip_cov_ub": 9.0}
    wrong = ActorConfig.model_validate({"policy_loss": {"dro_beta": 0.3}})
    with pytest.raises(ConfigError, match=r"actor\.policy_loss\.dro_beta=0\.3 has no effect"):
        policy_loss_options(wrong)


def test_the_scale_factor_belongs_to_one_aggregation() -> None:
    good = actor(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=64.0)
    assert policy_loss_options(good) == {}
    with pytest.raises(ConfigError, match=r"loss_scale_factor=64\.0 has no effect"):
        policy_loss_options(actor(loss_scale_factor=64.0))


@pytest.mark.parametrize("name", policy_losses.names())
def test_every_loss_runs_with_default_settings(name: str) -> None:
    assert policy_loss_options(actor(name)) == {}
