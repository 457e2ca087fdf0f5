"""What Flyte runs when a workflow has failed: the cause goes to MLflow, what is open is closed.

A stage that raises says so itself. This also sees what a stage can't tell of itself: a pod killed
for memory, a deadline, an image that can't be pulled. Checkpoints and cached results stay, so that
the next run goes on from them; Ray clusters end by themselves (`tasks.ray_cluster`).

Flyte wants a handler to have the inputs of its workflow, hence one a workflow.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from typing import Any

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error.error import FlyteError

from tasks.context import IMAGE, SMALL, RunContext, execution_tags, say
from tasks.inputs import RLHFConfig
from tasks.literal_types import read_errors
from tasks.profiles import ProfileName

EXECUTION_VARIABLE = "FLYTE_INTERNAL_EXECUTION_ID"
CAUSE_TAG = "hybridflyte.error"
NODE_TAG = "hybridflyte.failed_node"
OPTIONS: dict[str, Any] = {
    "cache": False,
    "requests": SMALL,
    "container_image": IMAGE,
    "retries": 2,
    "timeout": timedelta(minutes=30),
}

read_errors()

# Locally, executions have no name and a handler runs in the process that failed.
_opened: list[RunContext] = []


def note_opened(run: RunContext | None) -> None:
    """Remember the run that this process works on; None: a new one is about to be opened."""
    _opened[:] = [run] if run else []


@task(**OPTIONS)
def rlhf_failed(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    seed: int,
    profile: ProfileName,
    err: FlyteError | None = None,
) -> None:
    """Record why `rlhf` failed."""
    record_failure("rlhf", config, err)


@task(**OPTIONS)
def evaluate_only_failed(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    candidate: str,
    baseline: str,
    seed: int,
    profile: ProfileName,
    err: FlyteError | None = None,
) -> None:
    """Record why `evaluate_only` failed."""
    record_failure("evaluate_only", config, err)


@task(**OPTIONS)
def promote_only_failed(
    config: RLHFConfig,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    seed: int,
    err: FlyteError | None = None,
) -> None:
    """Record why `promote_only` failed."""
    record_failure("promote_only", config, err)


@task(**OPTIONS)
def retraining_failed(
    kickoff: datetime,
    config: RLHFConfig,
    path: str,
    seed: int,
    profile: ProfileName,
    err: FlyteError | None = None,
) -> None:
    """Record why `retraining` failed."""
    record_failure("retraining", config, err)


def record_failure(workflow: str, config: RLHFConfig, error: FlyteError | None) -> None:
    """Write the cause to the run in MLflow, end it and its stages as FAILED, sweep up.

    On a cluster a run that failed before it was opened is recorded as well. Locally such a one has
    nothing to record: the terminal shows the cause. What can't be recorded is said and not raised,
    for that would hide the cause.
    """
    from engine.errors import EngineError

    try:
        run_id = _run_of(workflow, config)
        if run_id:
            _close(config.tracking.experiment, run_id, error)
        _sweep()
    except (EngineError, OSError) as fault:
        say(f"failure: the cause could not be recorded ({fault})")


def _run_of(workflow: str, config: RLHFConfig) -> str:
    """The MLflow run of this execution; empty where there is none."""
    from engine.tracking import Tracker

    execution = os.environ.get(EXECUTION_VARIABLE)
    if not execution:
        return _opened[0].mlflow_run if _opened else ""
    tracker = Tracker(experiment=config.tracking.experiment)
    return tracker.start_pipeline(
        f"{workflow}-{execution}",
        config.model_dump(mode="json"),
        execution_tags(execution),
        key=execution,
    )


def _close(experiment: str, run_id: str, error: FlyteError | None) -> None:
    """Tag the run with the cause, and end it and the stages that did not end themselves."""
    from engine.tracking import Tracker
    from engine.tracking.values import tags

    tracker = Tracker(experiment=experiment)
    facts = {CAUSE_TAG: _cause(error), NODE_TAG: error.failed_node_id if error else ""}
    with tracker.talking("record a failure"):
        for key, value in tags(facts).items():
            tracker.client.set_tag(run_id, key, value)
        stages = tracker.client.search_runs(
            [tracker.experiment_id],
            f"tags.`mlflow.parentRunId` = '{run_id}' and attributes.status = 'RUNNING'",
        )
        for stage in stages:
            tracker.client.set_tag(stage.info.run_id, CAUSE_TAG, tags(facts)[CAUSE_TAG])
            tracker.client.set_terminated(stage.info.run_id, "FAILED")
    tracker.finish_pipeline(run_id, "FAILED")
    say(f"failure: recorded in MLflow run {run_id}")


def _cause(error: FlyteError | None) -> str:
    """The message without flytekit's words around it."""
    text = (error.message if error else "").strip()
    return text or "Flyte gave no message; see the failed node in its console"


def _sweep() -> None:
    """Remove what processes that died have left in this machine's staging folder."""
    from engine.storage.artifacts import staging
    from engine.storage.locations import home

    if (home() / ".staging").exists():
        with staging("failure"):
            pass
