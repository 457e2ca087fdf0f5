"""Roles, their order and their numbers of steps, from a configuration."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_engine import save_family, training_batch

from engine.config import ActorConfig, RLConfig
from engine.controller.launch import Pool
from engine.dataflows import choose_dataflow
from engine.dataflows.needs import needs_of
from engine.trainers.rl_setup import place, role_specs
from engine.workers.actor import ActorWorker
from engine.workers.base import WorkerContext

ALL = frozenset({"actor", "rollout", "reference", "critic", "reward"})


def config(**changes: Any) -> RLConfig:
    return RLConfig.model_validate(changes)


def specs(settings: RLConfig, roles: frozenset[str] = ALL) -> dict[str, dict[str, Any]]:
    found = role_specs(
        "folder",
        settings,
        roles,
        needs_of(settings, choose_dataflow(settings.algorithm)),
        max_response_length=6,
        max_model_len=40,
        seed=3,
        dtype="float32",
    )
    return {spec.name: spec.options for spec in found}


def test_policy_roles_share_a_process_and_the_reward_sits_apart() -> None:
    placement = place(config(trainer={"threads": 2, "placement": "local"}), ALL)
    assert placement.kind == "local"
    policy = ("actor", "rollout", "reference", "critic")
    assert placement.pools == (Pool(policy, cpus=2.0), Pool(("reward",), cpus=0.0))
    without = place(config(trainer={"threads": 2}), ALL - {"critic"})
    assert without.pools[0].roles == ("actor", "rollout", "reference")


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
    assert worker.optimizer._schedule.last_epoch == planned
