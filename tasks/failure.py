"""Failure handlers: record the cause in MLflow and end the runs that are still open.

A stage that raises records that itself. The handlers also cover what a stage can't report: a pod
killed for memory, a deadline, an image that can't be pulled. Checkpoints and cached results stay,
so that the next run resumes; Ray clusters end by themselves (`tasks.variants`).

Flyte requires a handler to have the inputs of its workflow, hence one per workflow.
"""

from __future__ import annotations

import functools
import inspect
import os
from datetime import datetime
from typing import TYPE_CHECKING, Any

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error.error import FlyteError

from engine.console import say
from engine.stages.settings import RunContext
from engine.stages.stage import execution_tags, hosted
from tasks.flytekit_setup import load_secrets
from tasks.host import FlyteHost, short
from tasks.inputs import RLHFConfig

if TYPE_CHECKING:
    from engine.tracking import Tracker

EXECUTION_VARIABLE = "FLYTE_INTERNAL_EXECUTION_ID"
CAUSE_TAG = "hybridflyte.error"
NODE_TAG = "hybridflyte.failed_node"

# Locally, executions have no name and a handler runs in the process that failed: this is its run,
# and empty while one is being opened.
current_run: list[RunContext] = []


def record_failure(workflow: str, config: RLHFConfig, error: FlyteError | None) -> None:
    """Write the cause to the MLflow run, end it and its stages as FAILED, and clean up.

    On a cluster a run that failed before it was opened is recorded as well; locally it has nothing
    to record. A failure to record is printed, not raised: that would hide the cause.
    """
    from engine.errors import EngineError
    from engine.storage.artifacts import staging
    from engine.storage.filesystem import home
    from engine.tracking import Tracker

    execution, settings = os.environ.get(EXECUTION_VARIABLE), config.model_dump(mode="json")
    name = f"{workflow}-{execution}"
    try:
        with hosted(FlyteHost()):
            tracker = Tracker(experiment=config.tracking.experiment)
            if execution:
                load_secrets()
                tags = execution_tags(execution)
                _end_runs(tracker, tracker.start_pipeline(name, settings, tags, execution), error)
            elif current_run:
                _end_runs(tracker, current_run[0].mlflow_run, error)
        if (home() / ".staging").exists():
            with staging("failure"):  # removes the files of processes that died
                pass
    except (EngineError, OSError) as fault:
        say(f"failure: the cause could not be recorded ({fault})")


def _end_runs(tracker: Tracker, run_id: str, error: FlyteError | None) -> None:
    """Tag the run with the cause, and end it and its stages that are still running."""
    from engine.tracking.connection import tags

    cause = (error.message if error else "").strip()
    cause = cause or "Flyte gave no message; see the failed node in its console"
    texts = tags({CAUSE_TAG: cause, NODE_TAG: error.failed_node_id if error else ""})
    with tracker.translated("record a failure"):
        for key, value in texts.items():
            tracker.client.set_tag(run_id, key, value)
        stages = tracker.client.search_runs(
            [tracker.experiment_id],
            f"tags.`mlflow.parentRunId` = '{run_id}' and attributes.status = 'RUNNING'",
        )
        for stage in stages:
            tracker.client.set_tag(stage.info.run_id, CAUSE_TAG, texts[CAUSE_TAG])
            tracker.client.set_terminated(stage.info.run_id, "FAILED")
    tracker.finish_pipeline(run_id, "FAILED")
    say(f"failure: recorded in MLflow run {run_id}")


def _handler(workflow: str, **inputs: type) -> Any:
    """Make the task that records why a workflow with these inputs beside `config` failed."""

    @functools.wraps(record_failure)  # flytekit takes no function that is local to another one
    def handle(config: RLHFConfig, err: FlyteError | None = None, **inputs: Any) -> None:
        record_failure(workflow, config, err)

    types = {"config": RLHFConfig, **inputs, "err": FlyteError | None}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in types]
    parameters[-1] = parameters[-1].replace(default=None)
    handle.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    handle.__annotations__ = {**types, "return": None}
    handle.__name__ = handle.__qualname__ = f"{workflow}_failed"
    handle.__doc__ = f"Record why `{workflow}` failed."
    return task(handle, **short())


_RUN: dict[str, type] = {"source": str, "path": str, "model": str, "seed": int, "profile": str}
_ARTIFACTS: dict[str, type] = dict.fromkeys(("dataset", "policy", "evaluation"), FlyteDirectory)

rlhf_failed = _handler("rlhf", **_RUN)
agents_failed = _handler("agents", **_RUN)
preference_failed = _handler("preference", **_RUN, preferences=str)
reward_model_failed = _handler("reward_model", **_RUN, preferences=str)
classic_rlhf_failed = _handler("classic_rlhf", **_RUN, preferences=str)
make_pairs_failed = _handler("make_pairs", **_RUN, policy=str)
evaluate_only_failed = _handler("evaluate_only", **_RUN, candidate=str, baseline=str)
promote_only_failed = _handler("promote_only", **_ARTIFACTS, seed=int, profile=str)
retraining_failed = _handler("retraining", kickoff=datetime, path=str, seed=int, profile=str)
