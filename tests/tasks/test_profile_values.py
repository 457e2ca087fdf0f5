"""Resource profiles as values: how they are given, and what they mean for the engine's settings."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import ParallelConfig
from engine.errors import ConfigError
from engine.parallel.layout import Layout
from engine.stages.plan import pin_named_content
from engine.stages.profiles import PROFILES, apply_profile, read_profile
from engine.trainers.auto_placement import fixed_settings
from engine.trainers.layout_checks import check_layouts
from engine.trainers.offline import check_offline_layout, offline_placement
from engine.trainers.run_plan import check_config
from tasks.inputs import RLHFConfig

WITH_GPUS = [name for name, profile in PROFILES.items() if profile.gpus]
SEVERAL_GPUS = [name for name in WITH_GPUS if name != "one-gpu"]


def settings(**rl: Any) -> RLHFConfig:
    """As a plan has them."""
    return pin_named_content(RLHFConfig.model_validate({"rl": rl}))


def fitted_to(config: RLHFConfig, profile: str) -> RLHFConfig:
    return apply_profile(config, PROFILES[profile])


def test_the_names() -> None:
    assert list(PROFILES) == ["laptop", "one-gpu", "8xA100", "2x8xH100", "mi300x"]
    assert all(profile.name == name for name, profile in PROFILES.items())


def test_sizes_of_one_s_own() -> None:
    own = read_profile("{cpus: 64, memory_gib: 500, gpus: 4, replicas: {start: 3, most: 4}}")
    assert (own.name, own.cpus, own.gpus, own.world) == ("custom", 64, 4, 12)
    assert (own.vendor, own.resource, own.image_kind) == ("nvidia", "nvidia.com/gpu", "cuda")
    assert own.layout == ParallelConfig(
        dp=3, fsdp=4, compute_dtype="bfloat16", activation_checkpointing=True
    )
    half = read_profile('{"base": "8xA100", "name": "half", "gpus": 4}')
    assert half == PROFILES["8xA100"].model_copy(update={"name": "half", "gpus": 4})
    assert read_profile("mi300x") is PROFILES["mi300x"]
    more = read_profile("{base: 2x8xH100, replicas: {most: 4}}").replicas
    assert (more.fewest, more.start, more.most) == (1, 2, 4)


def test_rocm_takes_the_same_path() -> None:
    for sizes in ("accelerator: AMD-Instinct-MI355X-OAM", "gpu_resource: amd.com/gpu"):
        amd = read_profile(f"{{cpus: 64, memory_gib: 500, gpus: 8, {sizes}}}")
        assert (amd.vendor, amd.resource, amd.image_kind) == ("amd", "amd.com/gpu", "rocm")
    assert not read_profile("mi300x").layout.activation_checkpointing, "its memory is enough"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("9xA100", "profile='9xA100' is none of laptop, one-gpu, 8xA100, 2x8xH100, mi300x"),
        ("{base: 9xA100}", "profile base='9xA100' is none of laptop"),
        ("{cpus: [", "no valid YAML"),
        ("{base: laptop, gpu: 1}", "profile: unknown setting 'gpu'"),
        ("{cpus: 4}", "memory_gib"),
        ("{base: laptop, shared_memory_gib: 8}", "shared_memory_gib=8 leaves nothing"),
        ("{base: laptop, accelerator: H100}", "accelerator='H100' with gpus=0"),
        ("{base: laptop, replicas: {start: 3}}", "fewest=1, start=3, most=2 are not in ascending"),
    ],
)
def test_what_is_no_profile(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_profile(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("profile", WITH_GPUS)
def test_a_layout_fits_its_machines(profile: str) -> None:
    fitted = fitted_to(settings(), profile)
    layout = Layout.of(fitted.rl.actor.parallel)
    assert layout.world_size == PROFILES[profile].world
    assert fitted.rl.actor.parallel.compute_dtype == "bfloat16"
    check_config(fitted.rl)  # its pools place each role once
    check_layouts(fitted.rl, fitted.model.lora)
    policy, beside = fitted.rl.trainer.pools
    assert policy.roles == ("actor", "rollout", "reference")
    assert policy.gpus == 1
    assert (beside.roles, beside.gpus) == (("reward",), 0)
    # All of it fits one machine's cores.
    whole = PROFILES[profile]
    assert policy.cpus * whole.gpus + beside.cpus <= whole.cpus


@pytest.mark.parametrize("profile", SEVERAL_GPUS)
def test_the_warm_start_is_laid_out_as_rl(profile: str) -> None:
    fitted, whole = fitted_to(settings(), profile), PROFILES[profile]
    assert fitted.sft.parallel == fitted.rl.actor.parallel
    check_offline_layout(fitted.sft, fitted.model.lora)
    (pool,) = offline_placement(fitted.sft).pools
    assert (pool.roles, pool.world_size, pool.gpus) == (("sft",), whole.world, 1)
    assert pool.cpus * whole.gpus <= whole.cpus


def test_the_warm_start_keeps_its_own_layout() -> None:
    own = {"parallel": {"fsdp": 4, "tp": 2}, "pools": [{"roles": ["sft"], "gpus": 1}]}
    asked = RLHFConfig.model_validate({"sft": own})
    fitted = fitted_to(asked, "8xA100").sft
    assert (fitted.parallel, fitted.pools) == (asked.sft.parallel, asked.sft.pools)
    assert fitted.placement == "ray"
    assert fitted_to(settings(), "one-gpu").sft == settings().sft
    none = RLHFConfig.model_validate({"sft": {"skip": True}, "model": {"path": "x/y"}})
    assert fitted_to(none, "8xA100").sft == none.sft


@pytest.mark.parametrize(
    ("sft", "profile", "said"),
    [
        ({"parallel": {"fsdp": 32}}, "8xA100", r"sft.parallel is a layout of 32 ranks.*most 16"),
        ({"parallel": {"dp": 2}}, "one-gpu", r"sft.parallel is a layout of 2 ranks.*most 1 GPUs"),
        ({"placement": "local"}, "8xA100", r"sft.placement=local with profile=8xA100.*leave"),
    ],
)
def test_a_warm_start_that_the_machines_can_t_take(
    sft: dict[str, Any], profile: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        fitted_to(RLHFConfig.model_validate({"sft": sft}), profile)


def test_an_evaluation_is_on_one_machine() -> None:
    config = RLHFConfig.model_validate({"evaluate": {"parallel": {"dp": 2, "tp": 4}}})
    assert fitted_to(config, "8xA100").evaluate.parallel == config.evaluate.parallel
    said = r"evaluate.parallel is a layout of 8 ranks.*machine of profile=one-gpu.*has 1 GPUs"
    with pytest.raises(ConfigError, match=said):
        fitted_to(config, "one-gpu")


def test_two_nodes_shard_inside_and_copy_between() -> None:
    parallel = fitted_to(settings(), "2x8xH100").rl.actor.parallel
    assert (parallel.dp, parallel.fsdp) == (2, 8)


def test_a_critic_is_placed_with_the_policy() -> None:
    ppo = settings(algorithm={"adv_estimator": "gae"}, rollout={"n": 1})
    fitted = fitted_to(ppo, "8xA100")
    check_config(fitted.rl)
    assert fitted.rl.trainer.pools[0].roles == ("actor", "rollout", "reference", "critic")


def test_without_gpus_nothing_is_filled_in() -> None:
    assert fitted_to(settings(), "laptop") == settings()


def test_what_the_settings_say_stays() -> None:
    own = settings(
        actor={"parallel": {"fsdp": 4, "tp": 2}},
        trainer={"pools": [{"roles": ["actor", "rollout", "reference"]}, {"roles": ["reward"]}]},
    )
    assert fitted_to(own, "8xA100").rl == own.rl


def test_rollout_apart_keeps_its_own_placement(capsys: pytest.CaptureFixture[str]) -> None:
    apart = settings(trainer={"mode": "one_step_off"})
    assert fitted_to(apart, "8xA100").rl == apart.rl
    assert "rl.trainer.mode=one_step_off" in capsys.readouterr().out


@pytest.mark.parametrize("profile", WITH_GPUS)
@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_the_planner_finds_layout_and_pools_open(
    profile: str, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = settings(trainer={"placement": "auto", "mode": mode})
    fitted = fitted_to(auto, profile)
    assert fitted.rl.actor.parallel == ParallelConfig(compute_dtype="bfloat16")
    assert fitted.rl.trainer == auto.rl.trainer
    pins = fixed_settings(fitted.rl)
    assert pins.axes == {}
    assert pins == fixed_settings(auto.rl)
    assert "chosen at each start" in capsys.readouterr().out


def test_the_planner_keeps_what_the_settings_say() -> None:
    own = settings(
        actor={"parallel": {"tp": 2, "compute_dtype": "float32"}}, trainer={"placement": "auto"}
    )
    assert fitted_to(own, "8xA100").rl == own.rl
    assert fixed_settings(fitted_to(own, "8xA100").rl).axes == {"tp": 2}


def test_a_layout_that_is_too_large() -> None:
    with pytest.raises(ConfigError, match=r"32 ranks, but profile=8xA100 has at most 16 GPUs"):
        fitted_to(settings(actor={"parallel": {"fsdp": 32}}), "8xA100")


def test_gpus_without_ray() -> None:
    with pytest.raises(ConfigError, match=r"placement=local with profile=one-gpu"):
        fitted_to(settings(trainer={"placement": "local"}), "one-gpu")
