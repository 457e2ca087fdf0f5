"""RL over several rollout servers, one of which dies and comes back; see `fake_server.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_server import FakeServer, drop, serving, status
from rollout_models import build
from tiny_engine import arithmetic_rows

from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.errors import EngineError
from engine.trainers.rl import RLTrainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def fakes() -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(serving(FakeServer(build("qwen2"), context=64))) for _ in range(2)
        ]


def trainer(folder: Path, fakes: list[FakeServer], mode: str, **changes: Any) -> RLTrainer:
    server = {
        "urls": [fake.url for fake in fakes],
        "weights": "folder",
        "reload_url": "/reload",
        "backoff_s": 0.01,
        "max_retries": 1,
        "timeout_s": 60.0,
    }
    settings = RLConfig.model_validate(
        {
            "actor": {"optim": {"lr": 5e-3, "warmup_ratio": 0.0}},
            "rollout": {"n": 4, "engine": "server", "server": server} | changes,
            "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
            "trainer": {
                "total_training_steps": 6,
                "train_batch_size": 4,
                "placement": "local",
                "mode": mode,
                "threads": 1,
            }
            | ({"max_rollout_restarts": 0} if mode == "async" else {}),
        }
    )
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, seed=0)
    return RLTrainer(
        folder, settings, loader, max_response_length=6, max_model_len=64, dtype="float32"
    )


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_a_server_that_dies_and_comes_back_costs_no_step(
    tiny_folder: Path, fakes: list[FakeServer], mode: str
) -> None:
    counts: list[int] = []
    with trainer(tiny_folder, fakes, mode) as subject:

        def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
            counts.append(fakes[1].count("/v1/completions"))
            if step == 2:  # it takes no weights and answers nothing
                fakes[1].always, fakes[1].reload_fault = drop, drop
            if step == 4:
                fakes[1].always = fakes[1].reload_fault = None

        subject.on_step = on_step
        subject.fit()
        history = subject.history
    assert len(history) == 6
    for row in history:
        assert row["staleness/max"] <= (0.0 if mode == "sync" else 1.0)
        if mode != "sync" and row["staleness/max"] == 0.0:
            assert row["rollout_corr/log_ppl_abs_diff"] < 1e-4
    assert counts[1] > 0, "it was asked before"
    assert fakes[1].count("/v1/completions") > counts[3], "and after"


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_when_all_servers_die_the_run_ends_with_one_error(
    tiny_folder: Path, fakes: list[FakeServer], mode: str
) -> None:
    with trainer(tiny_folder, fakes, mode) as subject:

        def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
            for fake in fakes:
                fake.always = status(503, "out of memory")

        subject.on_step = on_step
        with pytest.raises(EngineError, match=r"none of 2 rollout servers.*out of memory"):
            subject.fit()


def test_parts_of_a_rollout_come_from_servers_too(
    tiny_folder: Path, fakes: list[FakeServer]
) -> None:
    with trainer(tiny_folder, fakes, "sync", parts=2) as subject:
        subject.fit(num_steps=2)
        assert [row["staleness/max"] for row in subject.history] == [0.0, 0.0]
    assert all(fake.count("/v1/completions") > 3 for fake in fakes)
