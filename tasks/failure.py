"""Failure handlers: record the cause in MLflow and end the runs that are still open.

A stage that raises records that itself. The handlers also cover what a stage can't report: a pod
killed for memory, a deadline, an image that can't be pulled. Flyte requires a handler to have the
inputs of its workflow, hence one per workflow.
"""

import functools
import os
from datetime import datetime
from typing import Any

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error.error import FlyteError

from engine.stages import interfaces, stage
from engine.stages.settings import RunContext
from engine.stages.stage import hosted
from tasks.flytekit_setup import load_secrets
from tasks.host import FlyteHost, task_options
from tasks.inputs import RLHFConfig

EXECUTION_VARIABLE = "FLYTE_INTERNAL_EXECUTION_ID"

# Locally, executions have no name and a handler runs in the process that failed: this is its run,
# and empty while one is being opened.
current_run: list[RunContext] = []


def record_failure(workflow: str, config: RLHFConfig, error: FlyteError | None) -> None:
    """Write the cause to the MLflow run, end it and its stages as FAILED, and clean up."""
    execution = os.environ.get(EXECUTION_VARIABLE, "")
    run = current_run[0] if current_run and not execution else None
    with hosted(FlyteHost()):
        if execution:
            load_secrets()
        cause, node = (error.message, error.failed_node_id) if error else ("", "")
        stage.record_failure(workflow, config, cause, node=node, execution=execution, run=run)


def _handler(workflow: str, **inputs: type) -> Any:
    """Make the task that records why a workflow with these inputs beside `config` failed."""

    @functools.wraps(record_failure)  # flytekit takes no function that is local to another one
    def handle(config: RLHFConfig, err: FlyteError | None = None, **inputs: object) -> None:
        record_failure(workflow, config, err)

    types = {"config": RLHFConfig, **inputs, "err": FlyteError | None}
    signature = interfaces.signature(types, None, err=None)
    about = f"Record why `{workflow}` failed."
    handler = interfaces.declare(handle, f"{workflow}_failed", __name__, signature, about)
    return task(handler, **task_options("record_failure"))


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
