"""The RL loop end to end on a tiny model: it learns, and placement doesn't change a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from thorough import and_slow
from tiny_engine import arithmetic_rows
from transformers import AutoModelForCausalLM

from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, RewardError
from engine.trainers.rl import RLTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _room_for_the_policy(ray_cluster: None) -> None:
    """A Ray with as many CPUs as this machine's policy asks for."""


def config(placement: str = "local", **changes: Any) -> RLConfig:
    values: dict[str, Any] = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {"optim": {"lr": 5e-3, "weight_decay": 0.0, "warmup_ratio": 0.0}},
        "rollout": {"n": 4},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {
            "total_training_steps": 2,
            "train_batch_size": 4,
            "placement": placement,
            "threads": 1,
        },
    }
    for section, content in changes.items():
        values[section] = values.get(section, {}) | content
    return RLConfig.model_validate(values)


def trainer(folder: Path, settings: RLConfig, seed: int = 0) -> RLTrainer:
    frame = pd.DataFrame(arithmetic_rows(16))
    loader = PromptLoader(frame, settings.trainer.train_batch_size, seed)
    return RLTrainer(folder, settings, loader, max_response_length=6, max_model_len=40, seed=seed)


def run(folder: Path, out: Path, settings: RLConfig) -> tuple[list[dict[str, float]], Any]:
    """Each step's metrics without the times, and the weights that were saved."""
    history: list[dict[str, float]] = []
    with trainer(folder, settings) as subject:
        subject.on_step = lambda step, total, metrics: history.append(dict(metrics))
        subject.fit()
        history.append(subject.validate(arithmetic_rows(5)))
        subject.save(out)
    kept = [{k: v for k, v in metrics.items() if not k.startswith("perf/")} for metrics in history]
    return kept, AutoModelForCausalLM.from_pretrained(out).state_dict()


@pytest.mark.parametrize("name", and_slow(["grpo"], ["gae"]))
def test_local_and_ray_give_equal_runs(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    changes = {"algorithm": {"adv_estimator": name}, "actor": {"ppo_mini_batch_size": 10}}
    local, here = run(tiny_folder, tmp_path / "local", config("local", **changes))
    remote, there = run(tiny_folder, tmp_path / "ray", config("ray", **changes))
    assert local == remote
    assert ("critic/grad_norm" in local[0]) == (name == "gae")
    start = AutoModelForCausalLM.from_pretrained(tiny_folder).state_dict()
    assert here.keys() == there.keys()
    assert all(torch.equal(here[key], there[key]) for key in here)
    assert not all(torch.equal(here[key], start[key]) for key in here)
    tokenizer = load_tokenizer(tmp_path / "ray")
    assert tokenizer.get_vocab() == load_tokenizer(tiny_folder).get_vocab()


@pytest.mark.parametrize("name", ["grpo", "gae"])
def test_reward_goes_up(tiny_folder: Path, name: str) -> None:
    settings = config(
        algorithm={"adv_estimator": name},
        actor={"optim": {"lr": 2e-2, "weight_decay": 0.0, "warmup_ratio": 0.0}},
        rollout={"n": 8},
        trainer={
            "total_training_steps": 9,
            "train_batch_size": 8,
            "placement": "local",
            "threads": 1,
        },
    )
    rewards = []
    with trainer(tiny_folder, settings) as subject:
        subject.on_step = lambda step, total, metrics: rewards.append(metrics["reward/mean"])
        subject.fit()
    assert rewards[0] < 0.3
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2


def test_first_step_is_on_policy(tiny_folder: Path) -> None:
    with trainer(tiny_folder, config()) as subject:
        metrics = subject.fit(1)
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["actor/kl"] == pytest.approx(0.0, abs=1e-5)


def test_a_step_says_which_calls_took_its_time(tiny_folder: Path, tmp_path: Path) -> None:
    with trainer(tiny_folder, config(algorithm={"adv_estimator": "gae"})) as subject:
        subject.validation = arithmetic_rows(5)
        metrics, later = [subject.fit(1, checkpoint_dir=tmp_path) for _ in range(2)]
    calls = {name: value for name, value in metrics.items() if "." in name}
    roles = {"actor.update", "critic.update", "critic.values", "rollout.generate", "reward.score"}
    assert {f"perf/{call}_s" for call in roles} <= calls.keys()
    assert all(0 < value < metrics["perf/step_s"] for value in calls.values())
    assert metrics["perf/validation_s"] > 0
    between = [name for name in later if "generate_validation" in name or "save" in name]
    assert [name for name in between if name.startswith("perf/")] == []


def test_recomputed_log_probs_serve_truncated_sampling(tiny_folder: Path) -> None:
    with trainer(tiny_folder, config(rollout={"n": 4, "top_k": 5})) as subject:
        metrics = subject.fit(1)
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-5)


def test_a_failing_reward_costs_its_sample(tiny_folder: Path) -> None:
    settings = config(reward={"name": "tiny_engine:sometimes_broken", "isolation": "none"})
    with trainer(tiny_folder, settings) as subject:
        metrics = subject.fit(1)
    assert 0 < metrics["reward/errors"] < 1
    assert metrics["actor/grad_norm"] > 0


def test_fit_goes_on_where_it_stopped(tiny_folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    with trainer(tiny_folder, config()) as subject:
        subject.on_step = lambda step, total, metrics: seen.append((step, total))
        subject.fit(1)
        first = subject.source.prompts.loader.state_dict()
        subject.fit(1)
        assert subject.fit() == {}, "all configured steps are done"
    assert seen == [(1, 1), (2, 2)]
    assert subject.step == 2
    assert first != subject.source.prompts.loader.state_dict()


def test_validation_is_part_of_the_loop(tiny_folder: Path) -> None:
    settings = config(
        trainer={
            "total_training_steps": 3,
            "train_batch_size": 4,
            "placement": "local",
            "threads": 1,
            "test_freq": 2,
        }
    )
    seen: list[bool] = []
    with trainer(tiny_folder, settings) as subject:
        subject.validation = arithmetic_rows(5)
        subject.on_step = lambda step, total, metrics: seen.append("validation/reward" in metrics)
        last = subject.fit()
        assert (
            last["validation/reward"] == subject.validate(arithmetic_rows(5))["validation/reward"]
        )
    assert seen == [False, True, True]
    assert ["validation/reward" in row for row in subject.history] == seen


def test_adaptive_kl_in_the_reward(tiny_folder: Path) -> None:
    control = {"type": "adaptive", "kl_coef": 0.5, "target_kl": 10.0, "horizon": 100}
    settings = config(
        algorithm={"adv_estimator": "grpo", "use_kl_in_reward": True, "kl_ctrl": control}
    )
    with trainer(tiny_folder, settings) as subject:
        subject.fit(1)
        # KL ≈ 0 is far below the target: 16 completions lower β by 20 % · 16/100.
        assert subject.algo.kl_control.value == pytest.approx(0.5 * (1 - 0.2 * 16 / 100))


@pytest.mark.parametrize("placement", ["local", "ray"])
@pytest.mark.slow
def test_a_reward_that_raises_is_named_and_workers_are_closed(
    tiny_folder: Path, placement: str
) -> None:
    import ray

    settings = config(placement, reward={"name": "tiny_engine:broken_reward", "isolation": "none"})
    subject = trainer(tiny_folder, settings)
    message = "ZeroDivisionError: the judge is out"
    with subject, pytest.raises(RewardError, match=message):
        subject.fit()
    assert subject.step == 0
    if placement == "ray":
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(subject.roles.actor._actors[0].build.remote(), timeout=20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"adv_estimator": "grp"}}, "algorithm.adv_estimator='grp' is unknown"),
        ({"reward": {"overlong_buffer": {"enable": True, "len": 7}}}, "longest completion of 6"),
    ],
)
def test_wrong_settings_are_refused_before_any_worker_starts(
    tiny_folder: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("engine.trainers.rl.launch", lambda *args: started.append(args))
    with pytest.raises(ConfigError, match=message):
        trainer(tiny_folder, config(**changes))
    assert started == []
