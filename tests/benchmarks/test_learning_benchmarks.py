"""The benchmarks of what is learned, from end to end on a tiny model that learns nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.data.tokenizer import train_tokenizer
from engine.models import build_model, save_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ONE_STEP = ["trainer.total_training_steps=1", "trainer.train_batch_size=32"]

pytestmark = pytest.mark.slow


SHAPE = ModelConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def write_model(folder: Path) -> Path:
    tokenizer = train_tokenizer([f"What is {a} + {b}?" for a in range(20) for b in range(20)], 300)
    return save_model(build_model(SHAPE, tokenizer, seed=0), tokenizer, folder)


def run(name: str, cache: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), "--threads", "1", *arguments],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        cwd=cache,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("student", [["--layers", "0"], ["--layers", ""]], ids=str)
def test_distillation(tmp_path: Path, student: list[str]) -> None:
    teacher = write_model(tmp_path / "teacher")
    own = ["--teacher", str(teacher), "--epochs", "0.01", *student]
    said = run("distillation.py", tmp_path, *own, "--rl", *ONE_STEP)
    assert re.search(r"seed 0: student: \d+ parameters, warm start 0.0%", said)
    assert "over the teacher 0.0 points" in said


def test_preference_learning(tmp_path: Path) -> None:
    write_model(tmp_path / "hybridflyte" / "warm-start-0")
    said = run(
        *("preference_learning.py", tmp_path, "--tasks", "reward,dpo,ppo", "--prompts", "16"),
        *("--pairs", "reward={name: cosine_length}", "--reward", "max_steps=1"),
        *("--dpo", "max_steps=1", "--ppo", *ONE_STEP),
    )
    assert "held-out ones it ranks right" in said
    assert "dpo: greedy pass@1 0.0%" in said
    assert "ppo with the reward model: greedy pass@1" in said
