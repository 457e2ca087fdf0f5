"""The ten-line algorithm of docs/programming-model.md runs, through the trainer, as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from tiny_engine import arithmetic_rows

from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.trainers.rl import RLTrainer

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.usefixtures("one_thread")
def test_best_of(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "programming-model.md").read_text()
    source = next(b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "best_of" in b)
    assert len([line for line in source.split("@register")[1].splitlines() if line.strip()]) <= 10
    (tmp_path / "best_of.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RLConfig.model_validate(
        {
            "algorithm": {"dataflow": "best_of:best_of"},
            "actor": {"policy_loss": {"loss_mode": "reinforce"}, "optim": {"lr": 1e-2}},
            "rollout": {"n": 8},
            "reward": {"name": "tiny_engine:sometimes_right", "isolation": "none"},
            "trainer": {
                "total_training_steps": 3,
                "train_batch_size": 4,
                "placement": "local",
                "threads": 1,
            },
        }
    )
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    with RLTrainer(tiny_folder, config, loader, max_response_length=6, max_model_len=40) as trainer:
        metrics = trainer.fit()
    assert metrics["actor/grad_norm"] > 0
    assert 0 < metrics["reward/mean"] < 1
