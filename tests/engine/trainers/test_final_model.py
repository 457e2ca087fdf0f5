"""The best step by validation is what a run hands over, whatever stopped it on the way."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tiny_engine import arithmetic_rows

from engine.checkpoint import CheckpointStore, find_latest
from engine.cli.rl_run import RLRun, RunLog, TrainedPolicy, train_policy
from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.trainers.resume import choose_final_model, is_new_best
from engine.trainers.rl import Metrics, RLTrainer

SCORES = {1: 0.1, 2: 0.5, 3: 0.3, 4: 0.2}


def rows(*scores: float | None) -> list[dict[str, float]]:
    """A history: steps from 1 on, validated where there is a score."""
    return [
        {"step": float(step)} | ({} if score is None else {"validation/reward": score})
        for step, score in enumerate(scores, 1)
    ]


def saved(root: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(root, keep_last=9)
    for step in steps:
        store.commit(store.begin(step))
    return store


@pytest.mark.parametrize(
    ("scores", "step"),
    [
        ((0.1, 0.5, 0.3), 2),
        ((0.5, 0.5, 0.3), 2),  # the later one of equals
        ((0.1, None, 0.3, None), 3),
        ((0.4, float("nan"), 0.3), 1),
        ((None, None), 2),
    ],
)
def test_the_best_is_chosen_and_the_last_where_nothing_was_validated(
    tmp_path: Path, scores: tuple[float | None, ...], step: int
) -> None:
    store, history = saved(tmp_path, *range(1, len(scores) + 1)), rows(*scores)
    chosen = choose_final_model("best", history, store)
    assert (chosen.step, chosen.last, chosen.score) == (step, len(scores), scores[step - 1])
    at_end = step == len(scores)
    assert chosen.checkpoint == ("" if at_end else f"{tmp_path}/step_{step}")
    last = choose_final_model("last", history, store)
    assert (last.step, last.checkpoint) == (len(scores), "")


def test_a_step_equal_to_the_best_is_a_new_best() -> None:
    history = rows(0.2, 0.5, 0.4, 0.5)
    assert [is_new_best(history[:n]) for n in range(1, 5)] == [True, True, False, True]


def test_a_best_step_whose_checkpoint_is_gone_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = saved(tmp_path, 1, 3)
    with caplog.at_level(logging.WARNING):
        chosen = choose_final_model("best", rows(0.4, 0.5, 0.3), store)
    assert chosen.step == 1
    assert "step 1 is handed over: of 1 steps with a better validation reward" in caplog.text


def test_a_checkpoint_that_is_copied_is_older_than_all_others(tmp_path: Path) -> None:
    there, here = saved(tmp_path / "there", 2), saved(tmp_path / "here", 3)
    best = there.newest_of(2)
    assert best is not None
    here.adopt(best)
    assert here.complete() == ["step_2", "step_3"]
    newest = find_latest(tmp_path / "here")
    assert newest is not None
    assert newest.step == 3


@pytest.fixture(autouse=True)
def _scored(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation whose outcome is known: step 2 is the best."""
    monkeypatch.setattr(
        RLTrainer, "validate", lambda self, rows: {"validation/reward": SCORES[self.step]}
    )


def run(folder: Path, out: Path, checkpoints: Path, **changes: Any) -> RLRun:
    """Four steps; a model folder of each is written while it is the newest."""
    settings = {
        "total_training_steps": 4,
        "train_batch_size": 4,
        "placement": "local",
        "threads": 1,
        "save_freq": 100,
        "test_freq": 1,
        "max_checkpoints_to_keep": 1,
    }
    config = RLConfig.model_validate(
        {
            "actor": {"optim": {"lr": 5e-3}},
            "rollout": {"n": 2},
            "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
            "trainer": settings | changes.pop("trainer", {}),
        }
    )

    def save_model(write: Any, step: int) -> Path:
        target = out / f"step_{step}"
        if target.exists():
            target.rename(out / f"before_{step}")
        write(str(target))
        return target

    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    values: dict[str, Any] = {"save_freq": 1, "keep_last": True} | changes
    return RLRun(
        folder, config, loader, arithmetic_rows(2), 34, 6, out, checkpoints, save_model, **values
    )


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def stopped_after(last: int) -> RunLog:
    """A log that interrupts the run after a step."""

    class Log(RunLog):
        def step(self, step: int, total: int, metrics: Metrics, history: Sequence[Metrics]) -> None:
            if step > last:
                raise KeyboardInterrupt

    return Log(step_lines=False)


def assert_step_2(trained: TrainedPolicy, out: Path, as_it_was: Path) -> None:
    assert str(trained.final) == "step 2 of 4, the best by validation (0.500)"
    assert trained.folder == out / "step_2"
    assert content(trained.folder) == content(as_it_was)
    assert len(trained.history) == 4


def test_a_run_hands_over_its_best_step(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = train_policy(run(tiny_folder, tmp_path, tmp_path / "checkpoints"), RunLog())
    assert_step_2(trained, tmp_path, tmp_path / "before_2")
    assert content(tmp_path / "step_4") != content(tmp_path / "step_2")
    printed = capsys.readouterr().out
    assert "rl: hands over step 2 of 4, the best by validation (0.500)" in printed
    assert re.search(
        r"rl: shares of the steps' time \(calls may overlap\): .*actor\.update \d+%", printed
    )
    # Two that are kept, of all that was saved: the best and the newest.
    assert CheckpointStore(tmp_path / "checkpoints").complete() == ["step_2", "step_4"]
    last = run(tiny_folder, tmp_path / "b", tmp_path / "c", trainer={"final_model": "last"})
    chosen = train_policy(last, RunLog())
    assert str(chosen.final) == "step 4 of 4, the last (0.200)"
    assert CheckpointStore(tmp_path / "c").complete() == ["step_4"]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same folder", "next attempt's folder"])
def test_a_run_that_was_stopped_and_resumed_hands_over_the_same(
    tiny_folder: Path, tmp_path: Path, elsewhere: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    first = run(tiny_folder, tmp_path / "out", tmp_path / "a", trainer={"save_freq": 3})
    with pytest.raises(KeyboardInterrupt):
        train_policy(first, stopped_after(3))
    start = f"started again, the run continues from {tmp_path / 'a' / 'step_3'}\n"
    assert f"interrupted in step 4; {start}" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):  # before it has saved anything itself
        train_policy(first, stopped_after(3))
    assert f"interrupted in step 4; {start}" in capsys.readouterr().out
    as_it_was = Path(shutil.copytree(tmp_path / "out" / "step_2", tmp_path / "as_it_was"))
    where = tmp_path / "b" if elsewhere else tmp_path / "a"
    again = run(tiny_folder, tmp_path / "out", where, previous_checkpoints=tmp_path / "a")
    if elsewhere:  # as Flyte's next attempt, whose folder is its own
        with pytest.raises(KeyboardInterrupt):
            train_policy(again, stopped_after(3))
        assert CheckpointStore(where).complete() == ["step_2", "step_3"]
        shutil.rmtree(tmp_path / "a")
    assert_step_2(train_policy(again, RunLog()), tmp_path / "out", as_it_was)


def test_a_best_step_that_is_damaged_costs_the_last_nothing(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Log(RunLog):
        def step(self, step: int, total: int, metrics: Metrics, history: Sequence[Metrics]) -> None:
            if step == 4:
                best = tmp_path / "c" / "step_2"
                deadline = time.monotonic() + 60
                while not best.is_dir() and time.monotonic() < deadline:
                    time.sleep(0.01)
                for file in best.glob("actor-*.safetensors"):
                    file.write_bytes(b"flipped")

    trained = train_policy(run(tiny_folder, tmp_path, tmp_path / "c"), Log(step_lines=False))
    assert str(trained.final) == "step 4 of 4, the last (0.200)"
    assert trained.folder == tmp_path / "step_4"
    assert "the best by validation (0.500) is lost, and the last step" in capsys.readouterr().out
