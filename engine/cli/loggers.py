"""The log of a run from the command line: what `run.logger` names, opened and closed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine.cli.rl_run import RunLog
from engine.cli.settings import RunConfig, RunOutputConfig
from engine.tracking.metric_logs import MetricLogs, open_metric_logs

if TYPE_CHECKING:
    from engine.tracking import StageRun


@contextlib.contextmanager
def open_log(config: RunConfig, folder: Path, resumes: bool) -> Iterator[RunLog]:
    """The log for the block; a run in `folder` that resumes goes on in its file of metrics.

    Raises TrackingError where a tracker can't be reached, before the block.
    """
    settings = config.model_dump(mode="json")
    with open_trackers(config.run, settings, folder, resumes) as (tracked, logs):
        yield RunLog(tracked, logs, step_lines="console" in config.run.logger)


@contextlib.contextmanager
def open_trackers(
    own: RunOutputConfig, settings: dict[str, object], folder: Path, resumes: bool
) -> Iterator[tuple[StageRun | None, MetricLogs]]:
    """The MLflow run, if `own.logger` asks for one, and the other logs, as `open_log`."""
    with (
        _mlflow(own, settings) as tracked,
        open_metric_logs(
            own.logger,
            folder,
            project=own.project_name,
            run_name=own.experiment_name,
            settings=settings,
            keep=resumes,
        ) as logs,
    ):
        yield tracked, logs


@contextlib.contextmanager
def _mlflow(own: RunOutputConfig, settings: dict[str, object]) -> Iterator[StageRun | None]:
    """An MLflow run for the block where `run.logger` asks for one; the store is checked first."""
    if "mlflow" not in own.logger:
        yield None
        return
    from engine.tracking import Tracker

    tracker = Tracker(experiment=own.project_name)
    tracker.check()
    with tracker.stage(own.experiment_name, params=settings) as tracked:
        yield tracked
