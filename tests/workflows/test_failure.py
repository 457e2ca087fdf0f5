"""A stage that fails: the cause is in MLflow, nothing stays open, what was done stays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from flyte_runs import STAGES, Place, TriedAgain, settings
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import Literal, LiteralMap
from flytekit.types.error.error import FlyteError
from mlflow import MlflowClient
from mlflow.entities import Run
from protobufs import Registered

from engine.stages.stage import CAUSE_TAG, NODE_TAG
from engine.tracking import Tracker
from tasks.failure import record_failure
from tasks.inputs import RLHFConfig


def runs_of(tracking_uri: str) -> dict[str, Run]:
    """The runs in MLflow by name; the parent is `rlhf`."""
    client = MlflowClient(tracking_uri, tracking_uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "hybridflyte"]
    found = client.search_runs([experiment.experiment_id])
    return {run.info.run_name.split("-")[0]: run for run in found}


def test_a_failed_stage_ends_in_one_sentence(tried_again: TriedAgain) -> None:
    outcome = tried_again.failed
    assert outcome.code == 1
    assert outcome.stages == list(STAGES[:4])
    assert outcome.err.count("─ Error ─") == 1, outcome.text
    assert "the judge has no quota left" in outcome.error
    assert "Traceback" not in outcome.text


def test_the_cause_is_in_mlflow_and_nothing_is_open(tried_again: TriedAgain) -> None:
    outcome, runs = tried_again.failed, runs_of(tried_again.tracking_uri)
    assert {name: run.info.status for name, run in runs.items()} == {
        "rlhf": "FAILED",
        "dataset": "FINISHED",
        "sft": "FINISHED",
        "reward_audit": "FINISHED",
        "rl": "FAILED",
    }
    parent = runs["rlhf"]
    assert "the judge has no quota left" in parent.data.tags[CAUSE_TAG]
    assert f"failure: recorded in MLflow run {parent.info.run_id}" in outcome.out
    assert tried_again.half_written == []


def test_the_stages_before_it_are_cached(tried_again: TriedAgain) -> None:
    again = tried_again.again
    assert again.code == 0, again.text
    assert again.stages == list(STAGES[3:])
    assert again.summary["unchanged"] == ["dataset", "sft", "reward_audit"]


def test_a_run_that_was_never_opened_has_nothing_to_record(place: Place) -> None:
    outcome = place.run("--model", "/nowhere/model", "--config", settings())
    assert outcome.code == 1
    assert "failure:" not in outcome.out
    assert "does not exist" in outcome.error


def test_a_store_that_is_away_does_not_hide_the_cause(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The handler says so and returns, so that Flyte shows the stage's error."""
    with place.entered(
        MLFLOW_TRACKING_URI="http://127.0.0.1:9",
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
        FLYTE_INTERNAL_EXECUTION_ID="f1",
    ):
        record_failure("rlhf", RLHFConfig(), None)
    said = capsys.readouterr().out
    assert "failure: the cause could not be recorded" in said
    assert "http://127.0.0.1:9" in said


@pytest.fixture
def killed(place: Place) -> Iterator[str]:
    """An execution on a cluster whose RL pod was killed: its runs are open. The parent's id."""
    tracker = Tracker(place.tracking_uri)
    parent = tracker.start_pipeline("rlhf-20261121", key="f4e2")
    with tracker.stage("rl", parent):
        yield parent


def inputs(message: str) -> LiteralMap:
    """What Flyte hands to a failure node: the workflow's inputs, and the error."""
    context = FlyteContextManager.current_context()

    def literal(value: object, kind: Any) -> Literal:
        return TypeEngine.to_literal(context, value, kind, TypeEngine.to_literal_type(kind))

    values = {name: literal("", str) for name in ("source", "path", "model")}
    values |= {
        "config": literal(RLHFConfig(), RLHFConfig),
        "seed": literal(0, int),
        "profile": literal("8xA100", str),
        "err": literal(FlyteError(message, "n3"), FlyteError | None),
    }
    return LiteralMap(values)


@pytest.mark.parametrize("wrapped", [True, False])
def test_an_error_is_read_as_a_variant_or_bare(wrapped: bool) -> None:
    context = FlyteContextManager.current_context()
    kind: Any = FlyteError | None if wrapped else FlyteError
    given = FlyteError("out of memory", "n3")
    literal = TypeEngine.to_literal(context, given, kind, TypeEngine.to_literal_type(kind))
    received = Literal.from_flyte_idl(literal.to_flyte_idl())
    optional: Any = FlyteError | None
    assert TypeEngine.to_python_value(context, received, optional) == given


def test_a_killed_pod_is_recorded_by_the_registered_command(
    place: Place, killed: str, registered: Registered
) -> None:
    """The handler's own container arguments, with the inputs in a file as Flyte gives them."""
    root = place.root
    message = "OOMKilled: exit code 137"
    (root / "inputs.pb").write_bytes(inputs(message).to_flyte_idl().SerializeToString())
    filled = {
        "{{.input}}": str(root / "inputs.pb"),
        "{{.outputPrefix}}": str(root / "out"),
        "{{.rawOutputDataPrefix}}": str(root / "raw"),
        "{{.checkpointOutputPrefix}}": str(root / "checkpoint"),
        "{{.prevCheckpointPrefix}}": '""',
    }
    container = registered.task("rlhf_failed").container
    arguments = [filled.get(argument, argument) for argument in container.args]
    assert arguments[0] == "pyflyte-execute"
    done = subprocess.run(
        [sys.executable, "-m", "flytekit.bin.entrypoint", *arguments],
        env=place.environment({"FLYTE_INTERNAL_EXECUTION_ID": "f4e2"}),
        cwd=root / "work",
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (root / "out" / "outputs.pb").exists(), done.stdout + done.stderr
    runs = runs_of(place.tracking_uri)
    assert runs["rlhf"].info.run_id == killed
    assert {name: run.info.status for name, run in runs.items()} == {
        "rlhf": "FAILED",
        "rl": "FAILED",
    }
    assert runs["rlhf"].data.tags[CAUSE_TAG] == message
    assert runs["rlhf"].data.tags[NODE_TAG] == "n3"
    assert runs["rl"].data.tags[CAUSE_TAG] == message


def test_a_failure_before_the_run_was_opened_is_recorded_on_a_cluster(place: Place) -> None:
    with place.entered(FLYTE_INTERNAL_EXECUTION_ID="f5"):
        record_failure("evaluate_only", RLHFConfig(), None)
    run = runs_of(place.tracking_uri)["evaluate_only"]
    assert run.info.status == "FAILED"
    assert run.data.tags["flyte.execution"] == "f5"
    assert "Flyte gave no message" in run.data.tags[CAUSE_TAG]
