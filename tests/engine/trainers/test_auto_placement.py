"""`trainer.placement: auto`: settings for the machines that Ray reports, new at each start."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
from tiny_engine import arithmetic_rows

from engine.config import LoRAConfig, RLConfig
from engine.data.loader import PromptLoader
from engine.errors import ConfigError, PlacementError
from engine.planner import Cluster, Machine
from engine.planner.memory import RUNTIME
from engine.planner.resources import GIB
from engine.trainers import auto_placement as auto
from engine.trainers.resume import run_settings
from engine.trainers.rl import RLTrainer
from engine.trainers.run_plan import check_config
from engine.trainers.run_spec import layout_of

RESPONSE, LONGEST = 6, 40


def settings(**sections: Any) -> RLConfig:
    values: dict[str, Any] = {
        "actor": {"optim": {"lr": 5e-3, "weight_decay": 0.0, "warmup_ratio": 0.0}},
        "rollout": {"n": 2},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {
            "total_training_steps": 3,
            "train_batch_size": 4,
            "placement": "auto",
        },
    }
    for section, content in sections.items():
        values[section] = values.get(section, {}) | content
    return RLConfig.model_validate(values)


def cores(count: int, memory: int, machines: int = 1) -> Cluster:
    return Cluster(tuple(Machine(f"m{i}", float(count), memory) for i in range(machines)))


def gpus(count: int, gib: float) -> Cluster:
    return Cluster((Machine("m", 32.0, 900 * GIB, count, int(gib * GIB), "H100"),))


def resolved(folder: Path, config: RLConfig, cluster: Cluster, rank: int = 0) -> RLConfig:
    with mock.patch.object(auto.planner, "read_cluster", return_value=cluster):
        return auto.resolve_auto(
            config,
            model_path=str(folder),
            lora=LoRAConfig(rank=rank),
            dtype="float32",
            max_response_length=RESPONSE,
            max_model_len=LONGEST,
        )


def tight(folder: Path, config: RLConfig) -> Cluster:
    """Two machines of a core each, with so little memory that one rank alone doesn't fit."""
    for more in range(9, 70):
        cluster = cores(1, RUNTIME + int(1.25**more * 1000), machines=2)
        try:
            found = resolved(folder, config, cluster)
        except PlacementError:
            continue
        assert layout_of("actor", found).world_size == 2
        return cluster
    raise AssertionError("one rank always fits")


def test_a_laptop_runs_as_without_auto(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings()
    found = resolved(tiny_folder, config, cores(2, 4 * GIB))
    [policy, reward] = found.trainer.pools
    assert (policy.roles, policy.cpus) == (("actor", "rollout", "reference"), 2.0)
    assert (reward.roles, reward.cpus) == (("reward",), 0.0)
    assert found.trainer.placement == "ray"
    assert found.actor == config.actor
    assert found.rollout == config.rollout
    said = capsys.readouterr().out
    assert "auto found 1 machine, 2 cores, 4.0 GiB for workers" in said
    assert "chosen  one rank" in said
    untouched = settings(trainer={"placement": "ray"})
    assert resolved(tiny_folder, untouched, cores(2, 4 * GIB)) is untouched


def test_gpus_get_a_rank_each_and_what_is_set_stays(tiny_folder: Path) -> None:
    set_here = {"parallel": {"tp": 2}, "max_tokens_per_micro_batch": 128}
    found = resolved(tiny_folder, settings(actor=set_here), gpus(2, 40))
    assert found.actor.parallel.tp == 2
    assert found.actor.max_tokens_per_micro_batch == 128
    assert found.trainer.pools[0].gpus == 1.0
    critic = {"parallel": {"fsdp": 2}, "max_tokens_per_micro_batch": 512}
    ppo = settings(algorithm={"adv_estimator": "gae"}, critic=critic)
    found = resolved(tiny_folder, ppo, gpus(2, 40))
    assert found.critic == ppo.critic
    assert layout_of("actor", found).world_size == 2


def test_pools_that_are_set_stay_and_bound_the_layout(tiny_folder: Path) -> None:
    pools = [
        {"roles": ["actor", "rollout", "reference"], "cpus": 1, "gpus": 1},
        {"roles": ["reward"], "gpus": 3},
    ]
    config = settings(trainer={"pools": pools})
    found = resolved(tiny_folder, config, gpus(4, 40))
    assert found.trainer.pools == config.trainer.pools
    assert layout_of("actor", found).world_size == 1
    with pytest.raises(ConfigError, match=r"no valid layout .* can't hold the placement"):
        resolved(tiny_folder, settings(trainer={"pools": pools}), gpus(3, 40))


def test_rollout_that_runs_ahead_has_its_own_place(tiny_folder: Path) -> None:
    ahead = settings(trainer={"mode": "one_step_off"})
    found = resolved(tiny_folder, ahead, gpus(2, 40)).trainer.pools
    assert [pool.gpus for pool in found] == [1.0, 0.0, 1.0]
    found = resolved(tiny_folder, ahead, cores(4, 8 * GIB)).trainer.pools
    assert [pool.cpus for pool in found] == [2.0, 0.0, 2.0]
    with pytest.raises(ConfigError, match=r"there is one; set trainer.mode=sync"):
        resolved(tiny_folder, ahead, gpus(1, 40))


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_samplers_get_gpus_of_their_own(
    tiny_folder: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = resolved(tiny_folder, settings(trainer={"mode": mode}), gpus(2, 40))
    assert [(pool.roles[0], pool.gpus) for pool in found.trainer.pools] == [
        ("actor", 1.0),
        ("reward", 0.0),
        ("sampler", 1.0),
    ]
    assert found.trainer.rollout_workers == 1
    assert "roles   1 GPU(s) compute for" in capsys.readouterr().out
    check_config(found)
    two = settings(trainer={"mode": mode, "rollout_workers": 2})
    assert resolved(tiny_folder, two, gpus(4, 40)).trainer.rollout_workers == 2
    vllm = settings(
        trainer={"mode": mode}, rollout={"n": 2, "engine": "vllm", "tensor_parallel_size": 2}
    )
    found = resolved(tiny_folder, vllm, gpus(3, 40))
    assert found.rollout.tensor_parallel_size == 2
    assert found.rollout.vllm.in_process is False
    assert found.trainer.pools[-1].gpus == 2.0
    server = {"engine": "server", "server": {"urls": ["http://a", "http://b"]}}
    remote = resolved(tiny_folder, settings(trainer={"mode": mode}, rollout=server), gpus(2, 40))
    assert remote.trainer.rollout_workers == 1
    assert sum(pool.gpus for pool in remote.trainer.pools) == 1.0


def test_adapters_and_mini_batches_bound_the_layout(tiny_folder: Path) -> None:
    few = settings(actor={"ppo_mini_batch_size": 2, "parallel": {"dp": 4}})
    with pytest.raises(ConfigError, match="too few for 4 mini-batches"):
        resolved(tiny_folder, few, gpus(4, 40))
    layout = layout_of("actor", resolved(tiny_folder, settings(), gpus(2, 40), rank=4))
    assert layout.tp * layout.pp * layout.sp == 1


def test_another_plan_is_the_same_run(tiny_folder: Path) -> None:
    config = settings()
    one = resolved(tiny_folder, config, cores(2, 4 * GIB))
    two = resolved(tiny_folder, config, tight(tiny_folder, config))
    assert layout_of("actor", one) != layout_of("actor", two)
    assert run_settings(one, RESPONSE, 0) == run_settings(two, RESPONSE, 0)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_a_restart_on_other_machines_gets_a_new_layout_and_resumes(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings()

    def run(steps: int) -> tuple[RLTrainer, int]:
        loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
        with RLTrainer(
            tiny_folder, config, loader, max_response_length=RESPONSE, max_model_len=LONGEST
        ) as trainer:
            trainer.fit(steps, tmp_path / "run")
            return trainer, trainer.roles.actor.world_size

    first, ranks = run(1)  # on what the real Ray has
    assert (first.step, ranks) == (1, 1)
    # The same Ray, reported as two machines on which one rank alone doesn't fit.
    small = tight(tiny_folder, config)
    monkeypatch.setattr(auto, "read_cluster", lambda kinds: small)
    second, ranks = run(1)
    assert (second.step, ranks) == (2, 2)
    assert [row["step"] for row in second.history] == [1.0, 2.0]
    assert second.history[0] == first.history[0]
    assert all(row["actor/grad_norm"] > 0 for row in second.history)
