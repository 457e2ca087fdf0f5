"""Episodes whose turns a server samples: tokens in, tokens and log-probs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from fake_server import FakeServer, serving
from tiny_engine import arithmetic_rows
from transformers import AutoModelForCausalLM

from engine.batch import Batch
from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.trainers.rl import RLTrainer


def trainer(folder: Path, mode: str, **rollout: Any) -> RLTrainer:
    turns = {"multi_turn": {"enable": True, "max_turn_length": 6}}
    turns["agent"] = {"environment": "digit_games:DigitGame", "num_workers": 0}
    settings = RLConfig.model_validate(
        {
            "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
            "actor": {"optim": {"lr": 5e-3, "warmup_ratio": 0.0}},
            "rollout": {"n": 4} | turns | rollout,
            "reward": {"name": "environment"},
            "trainer": {
                "total_training_steps": 2,
                "train_batch_size": 2,
                "placement": "local",
                "mode": mode,
                "threads": 1,
            },
        }
    )
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(8)), 2, seed=0)
    return RLTrainer(folder, settings, loader, max_response_length=36, max_model_len=60)


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_a_server_samples_the_turns(tiny_folder: Path, mode: str) -> None:
    rows = arithmetic_rows(5)
    found: dict[str, Batch] = {}
    batches: list[Batch] = []

    def greedy(name: str, subject: RLTrainer) -> None:
        subject.on_rollouts = lambda split, step, batch: found.update({name: batch})
        subject.validate(rows)
        subject.on_rollouts = lambda split, step, batch: batches.append(batch)

    with trainer(tiny_folder, "sync") as native:
        greedy("native", native)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
    with serving(FakeServer(model, context=64)) as fake:
        server = {"url": fake.url, "weights": "folder", "reload_url": "/reload"}
        with trainer(tiny_folder, mode, engine="server", server=server) as subject:
            greedy("server", subject)
            subject.fit()
            history = subject.history
    assert len(history) == 2
    ours, theirs = found["server"], found["native"]
    for name in ("input_ids", "response_mask", "environment_rewards"):
        assert torch.equal(ours[name], theirs[name]), name
    for step, batch in enumerate(batches):
        assert history[step]["episode/turns_mean"] == 3
        kept = batch["response_mask"].bool()
        fresh = kept & (batch["token_versions"] == step)
        assert bool(fresh.any()) or mode == "async"
        torch.testing.assert_close(
            batch["old_log_probs"][fresh], batch["rollout_log_probs"][fresh], atol=1e-4, rtol=1e-4
        )
        assert step - int(batch["token_versions"][kept].min()) <= 1
