"""`tracking.logger` in a stage: files in its run's folder, and what a pod leaves in the store."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from s3_server import s3_bucket
from tracker_files import tensorboard_points, wandb_points

from engine.errors import ConfigError
from engine.stages.settings import RunContext
from engine.stages.training import open_loggers
from engine.storage.filesystem import Files

STAGE: Any = SimpleNamespace(kind="sft", config={"seed": 0})


def run(*logger: str) -> RunContext:
    return RunContext(run_id="r1", mlflow_run="x", experiment="sums", started_at=0.0, logger=logger)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TENSORBOARD_DIR", "HYBRIDFLYTE_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A shared store on a real S3 server."""
    with s3_bucket("shared") as bucket:
        monkeypatch.setenv("HYBRIDFLYTE_STORE", f"{bucket}/team")
        yield f"{bucket}/team"


def log_steps(first: int, last: int, *logger: str) -> None:
    with open_loggers(run(*logger), STAGE) as logs:
        for step in range(first, last + 1):
            logs.log_metrics({"sft/loss": 1 / step}, step)


def steps(lines: str | bytes) -> list[int]:
    return [json.loads(line)["step"] for line in lines.splitlines()]


def test_the_files_of_a_stage_are_in_its_run_s_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_steps(1, 3, "console", "file", "tensorboard")
    folder = home / "runs" / "r1" / "sft"
    assert steps((folder / "metrics.jsonl").read_text()) == [1, 2, 3]
    assert len(tensorboard_points(folder / "tensorboard", "sft/loss")) == 3
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "shared"))
    log_steps(1, 3, "tensorboard")
    assert len(tensorboard_points(tmp_path / "shared" / "r1" / "sft", "sft/loss")) == 3


def test_without_a_logger_there_is_nothing(home: Path) -> None:
    log_steps(1, 3, "console", "mlflow")
    assert not home.exists()


def test_an_attempt_in_another_pod_goes_on_from_what_the_store_has(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    try:
        log_steps(1, 4, "file", "tensorboard", "wandb")
    finally:
        wandb.teardown()
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "another pod"))
    log_steps(3, 5, "file", "tensorboard")  # from the checkpoint of step 2

    files = Files(f"{store}/runs/r1/sft")
    assert steps(files.read("metrics.jsonl")) == [1, 2, 3, 4, 5]
    copy = tmp_path / "copy"
    for name in files.sizes():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(files.read(name))
    points = tensorboard_points(copy / "tensorboard", "sft/loss")
    assert [step for step, _ in points] == [1, 2, 3, 4, 5]
    (offline,) = (copy / "wandb").rglob("*.wandb")
    assert [step for step, _ in wandb_points(offline, "sft/loss")] == [1, 2, 3, 4]
    assert b"sft-r1" in offline.read_bytes(), "the run's name"
    assert not list((copy / "wandb").glob("latest-run*")), "a link to what is there already"


def test_the_store_has_what_grows_while_the_stage_runs(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.stages.training.COPY_SECONDS", 0.05)
    files, deadline = Files(f"{store}/runs/r1/sft"), time.monotonic() + 30
    with open_loggers(run("file"), STAGE) as logs:
        for step in (1, 2):
            logs.log_metrics({"sft/loss": 0.5}, step)
            while not (files.sizes() and steps(files.read("metrics.jsonl"))[-1:] == [step]):
                assert time.monotonic() < deadline
                time.sleep(0.02)


def test_a_store_that_fails_costs_a_sentence_and_no_stage(
    store: str, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_STORE", "s3://no-such-bucket/team")
    monkeypatch.setattr("engine.stages.training.COPY_SECONDS", 0.05)
    with caplog.at_level(logging.WARNING), open_loggers(run("file"), STAGE) as logs:
        logs.log_metrics({"sft/loss": 0.5}, 1)
        time.sleep(0.3)
        logs.log_metrics({"sft/loss": 0.4}, 2)
    (said,) = (r.getMessage() for r in caplog.records if "metrics wait" in r.getMessage())
    assert "s3://no-such-bucket/team/runs/r1/sft" in said
    assert steps((home / "runs" / "r1" / "sft" / "metrics.jsonl").read_text()) == [1, 2]


def test_a_machine_without_the_package_says_so_before_the_stage(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^tracking\.logger: tensorboard needs the package"):
        log_steps(1, 1, "tensorboard")
    assert not home.exists()
