"""What Flyte tries again on a cluster: faults of services, and not those of what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from flytekit.core.context_manager import FlyteContextManager
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.models.core.identifier import WorkflowExecutionIdentifier
from s3_server import environment, s3_bucket

from engine.config import DataConfig
from engine.controller.launch import ray_session
from engine.data.incremental_data import find_new_files
from engine.data.sources import load_splits
from engine.lineage.lookup import write_origin
from engine.storage.artifacts import Draft, local_path
from engine.storage.digests import hash_files
from tasks.host import StageError, flyte_host, on_cluster

KICKOFF = datetime(2026, 11, 20, 2, tzinfo=UTC)
STEPS: dict[str, Callable[[], object]] = {
    "retraining trigger": lambda: find_new_files("s3://bucket/arrivals", KICKOFF, [], 30),
    "preprocess": lambda: load_splits(DataConfig(source="gsm8k", path="s3://bucket/gsm8k"), 0),
    "checkpoints": lambda: write_origin("s3://bucket/run", Draft(kind="rl")),
    "lineage": lambda: hash_files("s3://bucket/artifacts/rl/0123456789abcdef"),
    "an artifact": lambda: local_path("s3://bucket/artifacts/rl/0123456789abcdef"),
}


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Live as a task in a pod does."""
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path))
    context = FlyteContextManager.current_context()
    task = context.user_space_params.builder()
    task.execution_id = WorkflowExecutionIdentifier("hybridflyte", "production", "f1a2b3")
    state = context.new_execution_state().with_params(user_space_params=task.build())
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        assert on_cluster()
        yield


@pytest.mark.parametrize("step", STEPS)
def test_s3_away_is_tried_again(pod: None, step: str) -> None:
    with (
        environment(AWS_ENDPOINT_URL="http://127.0.0.1:9"),
        pytest.raises(FlyteRecoverableException, match="Could not connect"),
        flyte_host(),
    ):
        STEPS[step]()


def test_a_ray_that_does_not_start_is_tried_again(
    pod: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def init(**options: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(FlyteRecoverableException, match="Ray could not be started: The current"),
        flyte_host(),
        ray_session("ray"),
    ):
        pass


def test_what_s3_does_not_hold_is_not(pod: None) -> None:
    with s3_bucket("bucket"):
        for step in ("preprocess", "lineage"):
            with pytest.raises(StageError), flyte_host():
                STEPS[step]()
