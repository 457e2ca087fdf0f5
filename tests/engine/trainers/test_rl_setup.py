"""Roles, their order and their numbers of steps, from a configuration."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_engine import save_family, training_batch

from engine.config import ActorConfig, LoRAConfig, RLConfig
from engine.controller.placement import Pool
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import RequiredPasses
from engine.errors import ConfigError
from engine.parallel.layout import Layout
from engine.trainers.layout_checks import check_layouts
from engine.trainers.run_plan import check_config
from engine.trainers.run_spec import (
    RunSpec,
    call_layout,
    effective_config,
    placement_of,
    resolve_placement,
    role_specs,
    rollout_worker_placement,
    rollout_worker_spec,
)
from engine.workers.actor import ActorWorker
from engine.workers.role import WorkerContext

ALL = frozenset({"actor", "rollout", "reference", "critic", "reward"})


def config(**changes: Any) -> RLConfig:
    return RLConfig.model_validate(changes)


def run_spec(settings: RLConfig, roles: frozenset[str] = ALL) -> RunSpec:
    settings = effective_config(settings)
    needs = RequiredPasses.of(settings, choose_dataflow(settings.algorithm))
    return RunSpec("folder", settings, needs, roles, 6, 40, seed=3)


def specs(settings: RLConfig, roles: frozenset[str] = ALL) -> dict[str, dict[str, Any]]:
    return {spec.name: spec.options for spec in role_specs(run_spec(settings, roles))}


def test_policy_roles_share_a_process_and_the_reward_sits_apart() -> None:
    placement = placement_of(run_spec(config(trainer={"threads": 2, "placement": "local"})))
    assert placement.kind == "local"
    policy = ("actor", "rollout", "reference", "critic")
    assert placement.pools == (Pool(policy, cpus=2.0), Pool(("reward",), cpus=0.0))
    without = placement_of(run_spec(config(trainer={"threads": 2}), ALL - {"critic"}))
    assert without.pools[0].roles == ("actor", "rollout", "reference")


def test_pools_by_configuration() -> None:
    pools = [
        {"roles": ["actor", "rollout"], "gpus": 1, "labels": {"zone": "a"}},
        {"roles": ["reference", "critic"], "cpus": 2, "resources": {"fast": 1.0}},
        {"roles": ["reward"], "cpus": 0},
    ]
    placed = placement_of(run_spec(config(trainer={"pools": pools}))).pools
    assert placed[0] == Pool(("actor", "rollout"), gpus=1.0, labels={"zone": "a"})
    assert placed[1] == Pool(("reference", "critic"), cpus=2.0, resources={"fast": 1.0})
    assert [pool.name for pool in placed] == ["actor+rollout", "reference+critic", "reward"]


def test_a_sampler_gets_its_share_of_the_cores() -> None:
    settings = config(trainer={"threads": 6, "mode": "one_step_off", "rollout_threads": 4})
    pools = placement_of(run_spec(settings, ALL | {"sampler"})).pools
    assert [(pool.name, pool.cpus) for pool in pools[1:]] == [("reward", 0.0), ("sampler", 4.0)]
    assert pools[0].cpus == 2.0
    many = config(trainer={"threads": 7, "mode": "async", "rollout_workers": 2})
    assert placement_of(run_spec(many)).pools[0].cpus == 1.0  # two samplers with three each
    assert rollout_worker_placement("sampler1", run_spec(many)).pools == (
        Pool(("sampler1",), cpus=3.0),
    )
    assert rollout_worker_spec("sampler1", run_spec(many)).name == "sampler1"


def test_samplers_take_what_their_pool_says() -> None:
    pools = [
        {"roles": ["actor", "rollout", "reference", "critic"], "gpus": 1},
        {"roles": ["reward"], "cpus": 0},
        {"roles": ["sampler"], "cpus": 4, "gpus": 2, "labels": {"zone": "b"}},
    ]
    trainer = {"rollout_workers": 3, "pools": pools}
    ahead = run_spec(config(trainer=trainer | {"mode": "one_step_off"}), ALL | {"sampler"})
    sampler = Pool(("sampler",), world_size=3, cpus=4.0, gpus=2.0, labels={"zone": "b"})
    assert placement_of(ahead).pools[-1] == sampler
    assert call_layout("sampler", ahead.config) == Layout(dp=3)
    each = run_spec(config(trainer=trainer | {"mode": "async"}))
    assert [pool.name for pool in placement_of(each).pools][1:] == ["reward"]
    assert rollout_worker_placement("sampler2", each).pools == (
        replace(sampler, roles=("sampler2",), world_size=1),
    )
    plain = run_spec(
        config(trainer={"mode": "one_step_off", "rollout_workers": 2, "threads": 8}),
        ALL | {"sampler"},
    )
    assert placement_of(plain).pools[-1] == Pool(("sampler",), world_size=2, cpus=4.0)


APART = [{"roles": ["actor", "rollout", "reference"], "gpus": 1}, {"roles": ["reward"]}]
OWN = {"engine": "vllm", "tensor_parallel_size": 2, "vllm": {"in_process": False}}


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
@pytest.mark.parametrize(
    ("trainer", "rollout", "message"),
    [
        ({}, {"tensor_parallel_size": 2}, "a sampler is one process.*rollout.vllm.in_process"),
        ({}, {"engine": "vllm", "tensor_parallel_size": 2}, "a sampler is one process"),
        ({"rollout_workers": 129}, {}, "more than the prompts of a step"),
        (
            {"rollout_workers": 2},
            {"engine": "server", "server": {"urls": ["http://a", "http://b"]}},
            "one process speaks to all servers",
        ),
        ({"pools": [*APART, {"roles": ["sampler"]}]}, {}, "would decode on the CPU"),
        ({"pools": [*APART, {"roles": ["sampler"], "gpus": 1}]}, OWN, "set gpus of the pool"),
    ],
)
def test_samplers_that_can_t_be_are_refused(
    mode: str, trainer: dict[str, Any], rollout: dict[str, Any], message: str
) -> None:
    settings = config(trainer=trainer | {"mode": mode}, rollout=rollout)
    with pytest.raises(ConfigError, match=message):
        check_layouts(settings, LoRAConfig())
    check_layouts(config(trainer={"mode": mode, "rollout_workers": 2}, rollout=OWN), LoRAConfig())
    fitting = [*APART, {"roles": ["sampler"], "gpus": 2}]
    check_layouts(config(trainer={"mode": mode, "pools": fitting}, rollout=OWN), LoRAConfig())


def test_beside_a_sampler_the_trainer_s_own_rollout_only_validates() -> None:
    settings = config(trainer={"mode": "one_step_off"}, rollout={"engine": "vllm"})
    found = specs(settings, ALL | {"sampler"})
    assert found["sampler"]["config"].engine == "vllm"
    assert found["rollout"]["config"].engine == "native"


def test_rollout_that_runs_ahead_is_corrected_unless_told_how() -> None:
    assert effective_config(config()) == config()
    ahead = effective_config(config(trainer={"mode": "async"})).algorithm.rollout_correction
    assert ahead.rollout_is == "token"
    assert ahead.rollout_is_threshold == 2.0
    own = {"rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}}
    given = config(trainer={"mode": "async"}, algorithm=own)
    assert effective_config(given) == given


def test_only_the_dataflow_s_roles_are_built() -> None:
    assert set(specs(config(), ALL - {"critic"})) == ALL - {"critic"}


@pytest.mark.parametrize(("mini", "epochs"), [(0, 1), (10, 1), (7, 3)])
def test_the_schedule_ends_with_the_last_optimizer_step(
    tmp_path: Any, mini: int, epochs: int
) -> None:
    settings = config(
        actor={"ppo_mini_batch_size": mini, "ppo_epochs": epochs, "use_kl_loss": False},
        rollout={"n": 4},
        trainer={"train_batch_size": 5, "total_training_steps": 2},
    )
    planned = specs(settings)["actor"]["total_steps"]
    worker = ActorWorker(
        WorkerContext("actor"),
        model_path=str(save_family("qwen2", tmp_path)),
        config=ActorConfig.model_validate(settings.actor.model_dump()),
        temperature=1.0,
        total_steps=planned,
        seed=0,
    )
    for _ in range(settings.trainer.total_training_steps):
        worker.update(training_batch(20))
    assert worker.train_state.optimizer._schedule.last_epoch == planned


@pytest.mark.parametrize(("mini", "epochs", "steps"), [(0, 1, 1), (4, 1, 3), (8, 2, 4), (20, 1, 1)])
def test_pairs_of_a_step_are_fewer_than_its_completions(mini: int, epochs: int, steps: int) -> None:
    settings = config(
        algorithm={"dataflow": "online_dpo"},
        actor={"ppo_mini_batch_size": mini, "ppo_epochs": epochs},
        rollout={"n": 4},
        trainer={"train_batch_size": 5, "total_training_steps": 2},
    )
    check_config(settings)
    assert specs(settings)["actor"]["total_steps"] == 2 * steps


def test_one_process_is_enough_for_a_run_with_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(**changes: Any) -> str:
        return resolve_placement(config(**changes)).trainer.placement

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert chosen() == chosen(algorithm={"adv_estimator": "gae"}) == "local"
    assert config(trainer={"placement": "auto"}) == resolve_placement(
        config(trainer={"placement": "auto"})
    )
    needs_ray: list[dict[str, Any]] = [
        {"trainer": {"placement": "ray"}},
        {"trainer": {"mode": "one_step_off"}},
        {"trainer": {"mode": "async"}},
        {"trainer": {"pools": [{"roles": ["actor", "rollout", "reference", "reward"]}]}},
        {"actor": {"parallel": {"fsdp": 2}}},
        {"critic": {"parallel": {"dp": 2}}},
        {"rollout": {"engine": "vllm"}},
        {"rollout": {"engine": "vllm", "vllm": {"in_process": False}}},
    ]
    for changes in needs_ray:
        assert chosen(**changes) == "ray", changes
    with monkeypatch.context() as told:
        told.setenv("RAY_ADDRESS", "head:6379")
        assert chosen() == "ray"
        assert chosen(trainer={"placement": "local"}) == "local"
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert chosen() == "ray"
