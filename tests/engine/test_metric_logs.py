"""Metrics in a file, in TensorBoard and in Weights & Biases' offline mode, resumed runs too."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tracker_files import tensorboard_points, wandb_points

from engine.cli.rl_run import RunLog, open_log
from engine.cli.settings import RunConfig
from engine.errors import ConfigError, StorageError, TrackingError
from engine.tracking.metric_logs import (
    MetricLogs,
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
    whole = MetricsFile(path, keep=True)
    assert steps(path) == [0, 1, 2, 3, 4], "until something is logged, nothing is lost"
    for step in range(1, 4):  # the whole history, as RL tracks it after a resumption
        whole.log_metrics({"reward/mean": 1.0}, step)
    whole.close("KILLED")
    assert steps(path) == [0, 1, 2, 3], "what was not saved is void"
    rest = MetricsFile(path, keep=True)
    rest.log_metrics({"reward/mean": 2.0}, 3)  # the warm start's begins behind its checkpoint
    rest.log_metrics({"reward/mean": 2.0}, 4)
    rest.close("FINISHED")
    assert steps(path) == [0, 1, 2, 3, 4]
    values = [json.loads(line)["reward/mean"] for line in path.read_text().splitlines()]
    assert values == [0.0, 1.0, 1.0, 2.0, 2.0]
    MetricsFile(path, keep=False).close("FINISHED")
    assert steps(path) == []


def test_a_file_that_can_t_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match=r"can't write .*metrics\.jsonl: Not a directory; "):
        MetricsFile(tmp_path / "taken" / "metrics.jsonl", keep=False)


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
    for step in range(1, 5):
        second.log_metrics({"reward/mean": step / 10 if step < 4 else 0.9}, step)
    second.close("FINISHED")
    points = tensorboard_points(tmp_path, "reward/mean")
    assert [step for step, _ in points] == [1, 2, 3, 4]
    assert [value for _, value in points] == pytest.approx([0.1, 0.2, 0.3, 0.9])
    assert [step for step, _ in tensorboard_points(tmp_path, "validation/reward")] == [0]
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "elsewhere"))
    assert TensorBoardLog(tmp_path).folder == str(tmp_path / "elsewhere")
    assert TensorBoardLog(tmp_path, "r1/rl").folder == str(tmp_path / "elsewhere" / "r1" / "rl")


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
    require_packages(["console", "file", "mlflow"], "run.logger")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = r"^tracking\.logger: wandb needs the package wandb.*'hybridflyte\[wandb\]'"
    with pytest.raises(ConfigError, match=said):
        require_packages(["console", "wandb"], "tracking.logger")


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
        with open_log(config("file"), tmp_path, tmp_path / "checkpoints") as log:
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

    def close(self, status: str) -> None:
        raise OSError("no route to host")


def test_a_logger_that_fails_costs_one_sentence_and_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, path = Broken(), tmp_path / "metrics.jsonl"
    logs = MetricLogs()
    logs.logs |= {"wandb": broken, "file": MetricsFile(path, keep=False)}
    log = RunLog(logs=logs)
    with caplog.at_level(logging.WARNING):
        log.track([row(1, 0.1), row(2, 0.2)])
        log.track([row(1, 0.1), row(2, 0.2), row(3, 0.3)])
        logs.close("FINISHED")
    assert [record.getMessage() for record in caplog.records] == [
        "the logger wandb gets no more metrics: no route to host; training continues",
        "the logger wandb may lack the last metrics: no route to host",
    ]
    assert broken.calls == 1
    assert steps(path) == [1, 2, 3]
