"""Episodes are learned from end to end: a small model that guesses at random learns to search."""

from __future__ import annotations

from pathlib import Path

import guessing
import pandas as pd
import pytest

from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.trainers.rl import RLTrainer


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("estimator", ["grpo", "grpo_turn"])
def test_a_search_is_learned(tmp_path: Path, estimator: str) -> None:
    start = guessing.write_start(tmp_path / "start")
    config = RLConfig.model_validate(
        {
            "algorithm": {"adv_estimator": estimator},
            "actor": {
                "optim": {"lr": 1e-3, "weight_decay": 0.0, "warmup_ratio": 0.0},
                "use_kl_loss": False,
            },
            "rollout": {
                "n": 8,
                "multi_turn": {"enable": True, "max_turn_length": 4, "max_assistant_turns": 3},
                "agent": {"environment": "guessing:Guessing", "num_workers": 0},
            },
            "reward": {"name": "environment"},
            "trainer": {
                "total_training_steps": 80,
                "train_batch_size": 35,
                "placement": "local",
                "threads": 1,
                "test_freq": 100,
            },
        }
    )
    loader = PromptLoader(pd.DataFrame(guessing.rows(35)), 35, 0)
    solved: list[float] = []
    with RLTrainer(start, config, loader, max_response_length=40, max_model_len=60) as trainer:
        trainer.on_step = lambda step, total, metrics: solved.append(metrics["reward/mean"])
        trainer.fit()
        greedy = trainer.validate(guessing.rows(7))
    before, after = sum(solved[:3]) / 3, sum(solved[-3:]) / 3
    print(
        f"{estimator}: solved {before:.2f} → {after:.2f}, greedy {greedy['validation/reward']:.2f}"
    )
    assert before < 0.8
    assert after > before + 0.2
    assert after > 0.95
