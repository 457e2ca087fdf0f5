"""The log of a run from the command line: what `run.logger` names, opened and closed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.rl_run import RunLog
from engine.cli.settings import RunConfig
from engine.tracking.metric_logs import open_metric_logs

if TYPE_CHECKING:
    from engine.tracking import StageRun


@contextlib.contextmanager
def open_log(config: RunConfig, folder: Path, resumes: bool) -> Iterator[RunLog]:
    """The log for the block; a run in `folder` that resumes goes on in its file of metrics.

    Raises TrackingError where a tracker can't be reached, before the block.
    """
    own, settings = config.run, config.model_dump(mode="json")
    with (
        _mlflow(config, settings) as tracked,
        open_metric_logs(
            own.logger,
            folder,
            project=own.project_name,
            run_name=own.experiment_name,
            settings=settings,
            keep=resumes,
        ) as logs,
    ):
        yield RunLog(tracked, logs, step_lines="console" in own.logger)


@contextlib.contextmanager
def _mlflow(config: RunConfig, settings: dict[str, Any]) -> Iterator[StageRun | None]:
    """An MLflow run for the block where `run.logger` asks for one; the store is checked first."""
    if "mlflow" not in config.run.logger:
        yield None
        return
    from engine.tracking import Tracker

    tracker = Tracker(experiment=config.run.project_name)
    tracker.check()
    with tracker.stage(config.run.experiment_name, params=settings) as tracked:
        yield tracked
