"""Records of steps: a replay is the step to the bit, and says so where it is not."""

from __future__ import annotations

import pdb
import re
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_engine import arithmetic_rows

from engine.algorithms import aggregation
from engine.batch import Batch, LazyBatch
from engine.cli.commands import replay
from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.errors import ConfigError, DivergedError, RewardError, WorkerError
from engine.trainers import step_record
from engine.trainers.rl import RLTrainer
from engine.workers import actor

pytestmark = pytest.mark.usefixtures("one_thread")


def trainer(model: Path, debug: dict[str, Any], **changes: Any) -> RLTrainer:
    values: dict[str, Any] = {
        "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": True},
        "actor": {"ppo_mini_batch_size": 10},
        "critic": {"ppo_mini_batch_size": 10},
        "rollout": {"n": 4},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {
            "total_training_steps": 3,
            "train_batch_size": 4,
            "threads": 1,
            "placement": "local",
        },
        "debug": debug,
    } | changes
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    config = RLConfig.model_validate(values)
    return RLTrainer(model, config, loader, max_response_length=6, max_model_len=40)


@pytest.fixture(scope="module")
def recorded(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of the second of three steps of PPO."""
    folder = tmp_path_factory.mktemp("run")
    with trainer(tiny_folder, {"record_steps": [2]}) as run:
        run.fit(checkpoint_dir=folder)
    assert [path.name for path in (folder / "recorded").iterdir()] == ["step_2"]
    return folder / "recorded" / "step_2"


def test_a_step_is_the_same_again(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(recorded)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"same: \d\d metrics", lines[-1])
    assert lines[-1].endswith("metrics, to the bit")
    losses = [line.split() for line in lines if "_loss" in line]
    assert [name for name, *_ in losses] == ["critic/vf_loss", "actor/pg_loss"]
    assert all(before == after != "0.0" for _, before, after in losses)


def test_a_changed_loss_shows(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(*arguments: Any, **options: Any) -> torch.Tensor:
        return 2 * aggregation.aggregate(*arguments, **options)

    monkeypatch.setattr(actor, "aggregate", doubled)
    assert replay.main([str(recorded)]) == 1
    out = capsys.readouterr().out
    differing = [line.split()[0] for line in out.splitlines() if line.endswith("  differs")]
    assert "actor/grad_norm" in differing
    assert "critic/grad_norm" not in differing
    assert f"different: {len(differing)} of " in out
    assert replay.main([str(recorded), "--tolerance", "10"]) == 0


def test_more_rollouts_of_a_step_are_in_its_record(tiny_folder: Path, tmp_path: Path) -> None:
    dapo = {"filter_groups": {"enable": True, "max_num_gen_batches": 3}}
    reward = {"name": "tiny_engine:sometimes_right", "isolation": "none"}
    changes = {"algorithm": dapo, "reward": reward, "critic": {}}
    with trainer(tiny_folder, {"record_steps": [1]}, **changes) as run:
        metrics = run.fit(1, checkpoint_dir=tmp_path)
    assert metrics["sampling/rollouts"] > 1
    assert replay.main([str(tmp_path / "recorded" / "step_1")]) == 0


@pytest.mark.slow
def test_completions_that_were_sampled_ahead_are_in_the_record(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = {"mode": "one_step_off", "total_training_steps": 2, "train_batch_size": 4}
    changes = {"trainer": ahead | {"threads": 1, "placement": "local"}}
    with trainer(tiny_folder, {"record_steps": [2]}, **changes) as run:
        metrics = run.fit(checkpoint_dir=tmp_path)
    assert metrics["staleness/mean"] == 1.0
    assert replay.main([str(tmp_path / "recorded" / "step_2")]) == 0
    assert "run again on one" in capsys.readouterr().out


def test_a_step_that_fails_is_recorded_and_fails_again(
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def divided(*arguments: Any, **options: Any) -> torch.Tensor:
        raise ZeroDivisionError("no tokens")

    monkeypatch.setattr(actor, "aggregate", divided)
    with trainer(tiny_folder, {"record_failed": True}) as run, pytest.raises(WorkerError):
        run.fit(checkpoint_dir=tmp_path)
    opened: list[TracebackType] = []
    monkeypatch.setattr(pdb, "post_mortem", opened.append)
    assert replay.main([str(tmp_path / "recorded" / "step_1"), "--pdb"]) == 0
    out = capsys.readouterr().out
    assert "same: it fails as recorded: WorkerError" in out
    assert "no tokens" in out
    while opened[0].tb_next is not None:
        opened[0] = opened[0].tb_next
    assert opened[0].tb_frame.f_code.co_name == "divided"

    monkeypatch.setattr(actor, "aggregate", aggregation.aggregate)
    assert replay.main([str(tmp_path / "recorded" / "step_1")]) == 1
    assert "this one did not" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_reward_does_is_not_run_again(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = {"name": "tiny_engine:broken_reward", "isolation": "none"}
    debug = {"record_failed": True}
    with trainer(tiny_folder, debug, reward=reward) as run, pytest.raises(RewardError):
        run.fit(checkpoint_dir=tmp_path)
    assert replay.main([str(tmp_path / "recorded" / "step_1")]) == 2
    assert "ends before reward.score: it failed there: RewardError" in capsys.readouterr().err


def test_of_steps_that_may_fail_good_ones_leave_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer(tiny_folder, {"record_failed": True}) as run:
        run.fit(1, checkpoint_dir=tmp_path)
        assert list((tmp_path / "recorded").iterdir()) == []
        whole = run.algo.advantages

        def infinite(batch: LazyBatch) -> Batch:
            fields = whole(batch)
            return fields | {"returns": fields["returns"] * torch.inf}

        monkeypatch.setattr(run.algo, "advantages", infinite)
        with pytest.raises(DivergedError):
            run.fit(1, checkpoint_dir=tmp_path)
    assert [path.name for path in (tmp_path / "recorded").iterdir()] == ["step_2"]


def test_a_damaged_record_gets_one_sentence(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(folder: Path) -> str:
        assert replay.main([str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "step.pt is missing" in error_of(tmp_path / "none")
    copy = shutil.copytree(recorded, tmp_path / "copy")
    shutil.rmtree(copy / "state")
    assert "has no checkpoint; record the step again" in error_of(copy)
    whole = (copy / "step.pt").read_bytes()
    (copy / "step.pt").write_bytes(whole[: len(whole) // 2])
    assert "can't be read as a record" in error_of(copy)


def test_a_record_that_can_t_be_written_costs_a_warning(
    tiny_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: Any) -> None:
        raise TypeError("keys must be str")

    monkeypatch.setattr(step_record, "batch_to_tree", refuse)
    with trainer(tiny_folder, {"record_steps": [1]}) as run:
        assert run.fit(1, checkpoint_dir=tmp_path)["actor/grad_norm"] > 0
    assert "no record of this step (TypeError): keys must be str" in caplog.text


def test_records_need_a_folder(tiny_folder: Path) -> None:
    with (
        trainer(tiny_folder, {"record_steps": [1]}) as run,
        pytest.raises(ConfigError, match="give fit a checkpoint_dir"),
    ):
        run.fit(1)
