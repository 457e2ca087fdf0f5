"""Trains on episodes of slow games; a test kills it in the middle of a step.

    python killed_episodes.py MODEL OUT ENVIRONMENT_OR_AGENT

The history and the weights go to OUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import torch
from tiny_engine import arithmetic_rows

from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.trainers.rl import RLTrainer


def main(model: str, out: Path, environment: str) -> None:
    torch.set_num_threads(1)
    player = "play" if environment.startswith("agents_of_users:") else "environment"
    settings = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {"optim": {"lr": 5e-3}, "old_log_probs": "trainer"},
        "rollout": {
            "n": 4,
            "multi_turn": {"enable": True, "max_turn_length": 6},
            "agent": {
                player: {"name": environment, "options": {"delay": 0.2}},
                "num_workers": 0,
                "concurrency": 6,
                "save_freq_s": 0.1,
            },
        },
        "reward": {"name": "environment"},
        "trainer": {
            "total_training_steps": 3,
            "train_batch_size": 4,
            "placement": "local",
            "threads": 1,
            "save_freq": 1,
        },
    }
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    config = RLConfig.model_validate(settings)
    with RLTrainer(model, config, loader, max_response_length=36, max_model_len=60) as trainer:
        trainer.fit(checkpoint_dir=out / "checkpoints")
        trainer.save(out / "model")
        (out / "history.json").write_text(json.dumps(trainer.history))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
