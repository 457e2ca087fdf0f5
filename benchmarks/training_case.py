"""A small model, its prompts and a trainer: what the benchmarks of the RL loop share."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pandas as pd

from engine.config import ModelConfig, RLConfig
from engine.data.loader import PromptLoader
from engine.data.rows import rl_row
from engine.data.tokenizer import train_tokenizer
from engine.models import build_model, save_model
from engine.trainers.rl import RLTrainer

LONGEST = 64  # tokens of a completion


def write_model(folder: Path, hidden: int, layers: int) -> Path:
    """A Qwen2-shaped model with random weights, and a tokenizer of 512 tokens."""
    texts = [f"{a} plus {b} makes {a + b}.\n#### {a + b}" for a in range(60) for b in range(60)]
    shape = ModelConfig(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers)
    tokenizer = train_tokenizer(texts, 512)
    return save_model(build_model(shape, tokenizer, seed=0), tokenizer, folder)


def make_trainer(folder: Path, steps: int, prompts: int, n: int, **trainer: Any) -> RLTrainer:
    """GRPO on sums; the learning rate is next to nothing, so that lengths stay as they are."""
    config = RLConfig.model_validate(
        {
            "actor": {"optim": {"lr": 1e-7}},
            "rollout": {"n": n, "max_num_seqs": 256},
            "reward": {"name": "even_reward:even"},
            "trainer": {"total_training_steps": steps, "train_batch_size": prompts} | trainer,
        }
    )
    rows = [rl_row("bench", f"{i % 50} plus {i % 40} makes", "0", {}) for i in range(4096)]
    loader = PromptLoader(pd.DataFrame(rows), prompts, 0)
    return RLTrainer(folder, config, loader, max_response_length=LONGEST, max_model_len=128)


def timed_fit(trainer: RLTrainer, warm: int) -> float:
    """Seconds of all steps after the first `warm`."""
    at: list[float] = []
    trainer.on_step = lambda step, total, metrics: at.append(time.perf_counter())
    trainer.fit()
    return at[-1] - at[warm - 1]


def quiet() -> None:
    """No lines but the benchmark's."""
    from engine.console import quiet as hush

    hush()
    logging.getLogger("engine").setLevel(logging.ERROR)
