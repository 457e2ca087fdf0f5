"""The RL loop with roles sharded over ranks, as Ray actors: it does what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_engine import arithmetic_rows
from torch import Tensor

from engine.config import LoRAConfig, RLConfig
from engine.data.loader import PromptLoader
from engine.errors import ConfigError
from engine.models import load_model
from engine.trainers.rl import RLTrainer

pytestmark = pytest.mark.usefixtures("one_thread", "ray_cluster")

# One optimizer step a batch: mini-batches are cut from each rank's own rows.
PPO: dict[str, Any] = {
    "algorithm": {"adv_estimator": "gae"},
    "actor": {"use_kl_loss": True},
    "critic": {"optim": {"lr": 5e-3, "warmup_ratio": 0.0}},
}


def trainer(folder: Path, lora: int = 0, **sections: Any) -> RLTrainer:
    values: dict[str, Any] = {
        "actor": {"optim": {"lr": 5e-3, "weight_decay": 0.0, "warmup_ratio": 0.0}},
        "rollout": {"n": 2},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {"total_training_steps": 4, "train_batch_size": 4, "threads": 2},
    }
    for section, content in sections.items():
        values[section] = values.get(section, {}) | content
    settings = RLConfig.model_validate(values)
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    return RLTrainer(
        folder,
        settings,
        loader,
        max_response_length=6,
        max_model_len=40,
        lora=LoRAConfig(rank=lora),
    )


def course(
    folder: Path, out: Path, steps: int, checkpoints: Path | None = None, **sections: Any
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Each step's metrics, and the weights at the end."""
    with trainer(folder, **sections) as subject:
        subject.fit(steps, checkpoints)
        subject.save(out)
        return subject.history, load_model(out).state_dict()


COMPARED = (
    "reward/mean",
    "actor/grad_norm",
    "actor/kl",
    "critic/value_loss",
    "response/length_mean",
)


def assert_same(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        compared = [name for name in COMPARED if name in theirs]
        assert len(compared) > 3
        for name in compared:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=1e-4), name


@pytest.fixture(scope="module")
def alone(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    out = tmp_path_factory.mktemp("alone")
    local = {"total_training_steps": 4, "placement": "local"}
    return course(tiny_folder, out, 4, **PPO, trainer=local)


@pytest.mark.parametrize(
    ("parallel", "rollout_tp"),
    [({"tp": 2}, 1), ({"fsdp": 2}, 2), ({"pp": 2}, 1), ({"sp": 2}, 1)],
)
@pytest.mark.slow
def test_ppo_on_two_ranks_is_ppo_on_one(
    tiny_folder: Path,
    tmp_path: Path,
    alone: tuple[list[dict[str, float]], dict[str, Tensor]],
    parallel: dict[str, int],
    rollout_tp: int,
) -> None:
    sharded = PPO | {
        "actor": {"use_kl_loss": True, "parallel": parallel},
        "rollout": {"n": 2, "tensor_parallel_size": rollout_tp},
    }
    history, weights = course(tiny_folder, tmp_path, 4, **sharded)
    assert_same(history, alone[0])
    for name, tensor in alone[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=2e-3)


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_processes(
    tiny_folder: Path,
    tmp_path: Path,
    alone: tuple[list[dict[str, float]], dict[str, Tensor]],
) -> None:
    sharded = PPO | {"actor": {"use_kl_loss": True, "parallel": {"fsdp": 2}}}
    course(tiny_folder, tmp_path / "two", 2, tmp_path / "run", **sharded)
    local = {"placement": "local"}
    history, weights = course(
        tiny_folder, tmp_path / "one", 2, tmp_path / "run", **PPO, trainer=local
    )
    assert_same(history, alone[0])
    for name, tensor in alone[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
@pytest.mark.slow
def test_rollout_beside_a_sharded_trainer_gets_whole_weights(
    tiny_folder: Path, tmp_path: Path, mode: str
) -> None:
    run = {"mode": mode, "threads": 2, "rollout_threads": 1}
    pools = {"actor": {"parallel": {"fsdp": 2}}, "trainer": run}
    history, weights = course(tiny_folder, tmp_path, 3, **pools)
    assert all(row["actor/grad_norm"] > 0 for row in history)
    # Log-probs of the sampler's copy and of the trainer's shards agree where nothing was updated.
    assert history[0]["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)
    assert history[-1]["staleness/max"] <= 1
    assert weights


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"actor": {"parallel": {"tp": 8}}}, r"heads"),
    "layers": ({"actor": {"parallel": {"pp": 3}}}, r"layers"),
    "local": (
        {"actor": {"parallel": {"fsdp": 2}}, "trainer": {"placement": "local"}},
        r"layout of 2 ranks .*trainer.placement=ray",
    ),
    "rollout": (
        {"actor": {"parallel": {"fsdp": 2}}, "rollout": {"tensor_parallel_size": 3}},
        r"rollout.tensor_parallel_size=3 does not divide",
    ),
    "sizes": (
        PPO | {"actor": {"parallel": {"fsdp": 2}}, "critic": {"parallel": {"fsdp": 4}}},
        r"layouts of different sizes",
    ),
    "parts": (
        {"actor": {"parallel": {"fsdp": 2}}, "rollout": {"parts": 3}},
        r"rollout.parts=3 is more than the 2 prompts that each copy",
    ),
    "pairs": (
        {
            "algorithm": {"dataflow": "online_dpo"},
            "actor": {"parallel": {"fsdp": 2}, "ppo_mini_batch_size": 2},
        },
        r"ppo_mini_batch_size=2 holds no pair .*each of 2 data-parallel ranks; set 4 or more",
    ),
    "rows": ({"actor": {"parallel": {"fsdp": 8}}}, r"prompts don't give each of the actor's 8"),
}


@pytest.mark.parametrize("case", BAD)
def test_layouts_that_can_not_be_are_refused_before_anything_starts(
    tiny_folder: Path, case: str
) -> None:
    sections, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        trainer(tiny_folder, **sections)
