"""Failure handlers: record the cause in MLflow and end the runs that are still open.

A stage that raises records that itself. The handlers also cover what a stage can't report: a pod
killed for memory, a deadline, an image that can't be pulled. Checkpoints and cached results stay,
so that the next run resumes; Ray clusters end by themselves (`tasks.variants`).

Flyte requires a handler to have the inputs of its workflow, hence one per workflow.
"""

from __future__ import annotations

import os
from datetime import datetime

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error.error import FlyteError

from tasks.context import SHORT, RunContext, echo, execution_tags
from tasks.flytekit_setup import convert_error_literals, load_secrets
from tasks.inputs import RLHFConfig

EXECUTION_VARIABLE = "FLYTE_INTERNAL_EXECUTION_ID"
CAUSE_TAG = "hybridflyte.error"
NODE_TAG = "hybridflyte.failed_node"

convert_error_literals()

# Locally, executions have no name and a handler runs in the process that failed.
_current_run: list[RunContext] = []


def set_current_run(run: RunContext | None) -> None:
    """Set the run of this process; None while a new one is being opened."""
    _current_run[:] = [run] if run else []


@task(**SHORT)
def rlhf_failed(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    seed: int,
    profile: str,
    err: FlyteError | None = None,
) -> None:
    """Record why `rlhf` failed."""
    record_failure("rlhf", config, err)


@task(**SHORT)
def agents_failed(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    seed: int,
    profile: str,
    err: FlyteError | None = None,
) -> None:
    """Record why `agents` failed."""
    record_failure("agents", config, err)


@task(**SHORT)
def preference_failed(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    preferences: str,
    seed: int,
    profile: str,
    err: FlyteError | None = None,
) -> None:
    """Record why `preference` failed."""
    record_failure("preference", config, err)


@task(**SHORT)
def reward_model_failed(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    preferences: str,
    seed: int,
    profile: str,
    err: FlyteError | None = None,
) -> None:
    """Record why `reward_model` failed."""
    record_failure("reward_model", config, err)


@task(**SHORT)
def classic_rlhf_failed(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    preferences: str,
    seed: int,
    profile: str,
    err: FlyteError | None = None,
) -> None:
    """Record why `classic_rlhf` failed."""
    record_failure("classic_rlhf", config, err)


@task(**SHORT)
def make_pairs_failed(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    policy: str,
    seed: int,
    profile: str,
    err: FlyteError | None = None,
) -> None:
    """Record why `make_pairs` failed."""
    record_failure("make_pairs", config, err)


@task(**SHORT)
def evaluate_only_failed(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    candidate: str,
    baseline: str,
    seed: int,
    profile: str,
    err: FlyteError | None = None,
) -> None:
    """Record why `evaluate_only` failed."""
    record_failure("evaluate_only", config, err)


@task(**SHORT)
def promote_only_failed(
    config: RLHFConfig,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    seed: int,
    profile: str,
    err: FlyteError | None = None,
) -> None:
    """Record why `promote_only` failed."""
    record_failure("promote_only", config, err)


@task(**SHORT)
def retraining_failed(
    kickoff: datetime,
    config: RLHFConfig,
    path: str,
    seed: int,
    profile: str,
    err: FlyteError | None = None,
) -> None:
    """Record why `retraining` failed."""
    record_failure("retraining", config, err)


def record_failure(workflow: str, config: RLHFConfig, error: FlyteError | None) -> None:
    """Write the cause to the MLflow run, end it and its stages as FAILED, and clean up.

    On a cluster a run that failed before it was opened is recorded as well; locally it has nothing
    to record. A failure to record is printed, not raised: that would hide the cause.
    """
    from engine.errors import EngineError

    try:
        if os.environ.get(EXECUTION_VARIABLE):
            load_secrets()
        run_id = _mlflow_run(workflow, config)
        if run_id:
            _end_runs(config.tracking.experiment, run_id, error)
        _clean_staging()
    except (EngineError, OSError) as fault:
        echo(f"failure: the cause could not be recorded ({fault})")


def _mlflow_run(workflow: str, config: RLHFConfig) -> str:
    """The MLflow run of this execution; empty where there is none."""
    execution = os.environ.get(EXECUTION_VARIABLE)
    if not execution:
        return _current_run[0].mlflow_run if _current_run else ""
    from engine.tracking import Tracker

    tracker = Tracker(experiment=config.tracking.experiment)
    return tracker.start_pipeline(
        f"{workflow}-{execution}",
        config.model_dump(mode="json"),
        execution_tags(execution),
        key=execution,
    )


def _end_runs(experiment: str, run_id: str, error: FlyteError | None) -> None:
    """Tag the run with the cause, and end it and its stages that are still running."""
    from engine.tracking import Tracker
    from engine.tracking.connection import tags

    tracker = Tracker(experiment=experiment)
    facts = {CAUSE_TAG: _cause(error), NODE_TAG: error.failed_node_id if error else ""}
    with tracker.translated("record a failure"):
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
    echo(f"failure: recorded in MLflow run {run_id}")


def _cause(error: FlyteError | None) -> str:
    """The error message, or where to find it."""
    text = (error.message if error else "").strip()
    return text or "Flyte gave no message; see the failed node in its console"


def _clean_staging() -> None:
    """Remove the staging files of processes that died."""
    from engine.storage.artifacts import staging
    from engine.storage.filesystem import home

    if (home() / ".staging").exists():
        with staging("failure"):
            pass
