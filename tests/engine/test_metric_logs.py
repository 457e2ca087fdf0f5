"""Metrics in a file, in TensorBoard and in Weights & Biases' offline mode, resumed runs too."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tracker_files import tensorboard_points, wandb_points

from engine.cli.loggers import open_log
from engine.cli.rl_run import RunLog
from engine.cli.settings import RunConfig
from engine.errors import ConfigError, TrackingError
from engine.tracking.metric_logs import (
    MetricsFile,
    TensorBoardLog,
    WandbLog,
    require_packages,
)

Rows = list[dict[str, float]]


def row(step: int, value: float) -> dict[str, float]:
    return {"step": float(step), "reward/mean": value}


def config(*loggers: str) -> RunConfig:
    values = {"logger": loggers, "project_name": "sums", "experiment_name": "first"}
    return RunConfig.model_validate({"run": values})


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_file_has_each_step_once_whatever_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsFile(path, keep=False)
    for step in range(5):
        log.log_metrics({"reward/mean": step / 10}, step)
    assert steps(path) == [0, 1, 2, 3, 4], "on disk at once"
    with path.open("a") as file:
        file.write('{"step": 5, "rew')  # the process was killed here
    second = MetricsFile(path, keep=True)
    second.resumed(3)
    for step in range(1, 7):  # the whole history, as it is tracked after a resumption
        second.log_metrics({"reward/mean": 1.0}, step)
    second.resumed(2)  # a lost worker: this process goes on from a checkpoint of its own
    second.close("FINISHED")
    assert steps(path) == [0, 1, 2, 3, 4, 5, 6]
    values = [json.loads(line)["reward/mean"] for line in path.read_text().splitlines()]
    assert values == [0.0, 0.1, 0.2, 0.3, 1.0, 1.0, 1.0]
    MetricsFile(path, keep=False).close("FINISHED")
    assert steps(path) == []


def test_tensorboard_shows_a_resumed_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    first = TensorBoardLog(tmp_path)
    first.log_metrics({"validation/reward": 0.05}, 0)
    for step in range(1, 6):
        first.log_metrics({"reward/mean": step / 10}, step)
    first.close("KILLED")
    second = TensorBoardLog(tmp_path)
    second.resumed(3)
    for step in range(1, 5):
        second.log_metrics({"reward/mean": step / 10 if step < 4 else 0.9}, step)
    second.close("FINISHED")
    points = tensorboard_points(tmp_path, "reward/mean")
    assert [step for step, _ in points] == [1, 2, 3, 4]
    assert [value for _, value in points] == pytest.approx([0.1, 0.2, 0.3, 0.9])
    assert [step for step, _ in tensorboard_points(tmp_path, "validation/reward")] == [0]
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "elsewhere"))
    assert TensorBoardLog(tmp_path).folder == tmp_path / "elsewhere"


@pytest.fixture
def wandb_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for Weights & Biases, which knows no login; its helper process ends afterwards."""
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    yield tmp_path
    wandb.teardown()


def test_weights_and_biases_offline_has_settings_and_a_value_a_step(
    wandb_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = WandbLog("sums", "first", wandb_folder, {"rl": {"api_key": "hunter2hunter2"}, "seed": 3})
    for step in range(3):
        log.log_metrics({"reward/mean": step / 10}, step)
    log.close("FINISHED")
    assert capfd.readouterr() == ("", "")
    pytest.importorskip("wandb").teardown()  # its helper process writes the file's end
    (file,) = wandb_folder.rglob("*.wandb")
    assert b"hunter2hunter2" not in file.read_bytes()
    assert wandb_points(file, "reward/mean") == [(0, 0.0), (1, 0.1), (2, 0.2)]


def test_weights_and_biases_without_a_login_is_one_sentence(
    wandb_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(TrackingError, match=r"Weights & Biases: .*WANDB_MODE=offline") as caught:
        WandbLog("sums", "first", wandb_folder, {})
    assert "\n" not in str(caught.value)


def test_a_logger_without_its_package_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    require_packages(["console", "file", "mlflow"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package wandb.*'hybridflyte\[wandb\]'"):
        require_packages(["console", "wandb"])


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (KeyboardInterrupt, "KILLED"), (KeyError, "FAILED")]
)
def test_loggers_are_closed_on_every_exit(
    error: type[BaseException] | None, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    close = MetricsFile.close
    monkeypatch.setattr(MetricsFile, "close", lambda self, s: (ends.append(s), close(self, s))[1])

    def run() -> None:
        with open_log(config("file"), tmp_path, resumes=False) as log:
            log.track([row(1, 0.5)])
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert ends == [status]
    assert steps(tmp_path / "metrics.jsonl") == [1]


class Broken:
    """A tracker whose server is away."""

    calls = 0

    def log_metrics(self, metrics: object, step: int) -> None:
        self.calls += 1
        raise OSError("no route to host")

    def resumed(self, step: int) -> None: ...

    def close(self, status: str) -> None: ...


def test_a_logger_that_fails_costs_one_sentence_and_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, file = Broken(), MetricsFile(tmp_path / "metrics.jsonl", keep=False)
    log = RunLog(logs={"wandb": broken, "file": file})
    with caplog.at_level(logging.WARNING):
        log.track([row(1, 0.1), row(2, 0.2)])
        log.track([row(1, 0.1), row(2, 0.2), row(3, 0.3)])
    (record,) = caplog.records
    assert record.getMessage() == (
        "run.logger: wandb gets no more metrics: no route to host; training continues"
    )
    assert broken.calls == 1
    assert steps(file.path) == [1, 2, 3]
