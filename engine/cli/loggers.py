"""The log of a run from the command line: what `run.logger` names, opened and closed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.rl_run import RunLog
from engine.cli.settings import RunConfig
from engine.errors import PreemptedError, StorageError
from engine.tracking.metric_logs import MetricLog, MetricsFile, TensorBoardLog, WandbLog

if TYPE_CHECKING:
    from engine.tracking import StageRun


_METRIC_LOGS = ("file", "tensorboard", "wandb")


@contextlib.contextmanager
def open_log(config: RunConfig, folder: Path, resumes: bool) -> Iterator[RunLog]:
    """The log for the block; a run in `folder` that resumes goes on in its file of metrics.

    Raises TrackingError where a tracker can't be reached, before the block.
    """
    logs: dict[str, MetricLog] = {}
    status = "FAILED"
    with _mlflow(config) as tracked:
        try:
            for name in dict.fromkeys(config.run.logger):
                if name in _METRIC_LOGS:
                    logs[name] = _make(name, config, folder, resumes)
            yield RunLog(tracked, logs, step_lines="console" in config.run.logger)
            status = "FINISHED"
        except (KeyboardInterrupt, SystemExit, PreemptedError):
            status = "KILLED"
            raise
        finally:
            for log in logs.values():
                log.close(status)


def _make(name: str, config: RunConfig, folder: Path, resumes: bool) -> MetricLog:
    if name == "file":
        path = folder / "metrics.jsonl"
        try:
            return MetricsFile(path, keep=resumes)
        except OSError as error:
            raise StorageError(
                f"can't write {path}: {error.strerror or error}; free space, or choose another "
                "run.default_local_dir"
            ) from error
    if name == "tensorboard":
        return TensorBoardLog(folder / "tensorboard")
    settings: dict[str, Any] = config.model_dump(mode="json")
    return WandbLog(config.run.project_name, config.run.experiment_name, folder, settings)


@contextlib.contextmanager
def _mlflow(config: RunConfig) -> Iterator[StageRun | None]:
    """An MLflow run for the block where `run.logger` asks for one; the store is checked first."""
    if "mlflow" not in config.run.logger:
        yield None
        return
    from engine.tracking import Tracker

    tracker = Tracker(experiment=config.run.project_name)
    tracker.check()
    settings: dict[str, Any] = config.model_dump(mode="json")
    with tracker.stage(config.run.experiment_name, params=settings) as tracked:
        yield tracked
