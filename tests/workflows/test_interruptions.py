"""Attempts, interruptions and their checkpoints."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import psutil
import pytest
from attempts import Attempt, Inputs, prepared_inputs, s3_variables
from flyte_runs import PYFLYTE, WORKFLOW, Place, settings
from flyteidl.core.errors_pb2 import ContainerError
from protobufs import Registered

from engine.stages.stage import Stage
from engine.storage.artifacts import read_manifest

TIMES = ("perf/", "checkpoint/", "step")


@pytest.fixture(scope="module")
def inputs(new_place: Callable[[], Place]) -> Inputs:
    """A dataset, a warm start, and what the workflow hands to its stages."""
    return prepared_inputs(new_place())


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    """A real S3 server, and the variables by which Flyte names it to pods."""
    with s3_variables("flyte") as variables:
        yield variables


def struck_and_tried_again(
    stage: str, inputs: Inputs, args: list[str], where: str, variables: dict[str, str]
) -> tuple[Attempt, Attempt, Attempt]:
    """An attempt that is pre-empted, the one after it, and one that nothing happens to."""
    # Flyte names the checkpoints of the attempt before, whether it had come to write any or not.
    whole = Attempt(inputs, stage, args, where, "whole", before="never", variables=variables)
    first = Attempt(inputs, stage, args, where, "first", variables=variables)
    with whole.running(), first.running() as process:
        first.wait_for_a_checkpoint(process)
        process.send_signal(signal.SIGTERM)
    second = Attempt(inputs, stage, args, where, "second", before="first", variables=variables)
    with second.running():
        pass
    return first, second, whole


def tried_after_the_end(second: Attempt, whole: Attempt) -> Attempt:
    """One attempt more, as when the result's upload failed: it says so, and gives the same."""
    third = Attempt(
        second.inputs,
        second.stage,
        second.args,
        second.where,
        "third",
        before="second",
        variables=second.variables,
    )
    with third.running() as process:
        pass
    assert process.returncode == 0, third.text
    done = r"(all \d+ steps are done|is at step (\d+) of \2) already"
    assert re.search(done, third.text), third.text
    assert third.digest("model.safetensors") == whole.digest("model.safetensors")
    return third


def assert_recoverable(first: Attempt, stage: str) -> int:
    """The step after which the first attempt ended, saved."""
    assert {*first.names("out")} - {"deck.html"} == {"error.pb"}, first.text  # RL's Deck is live
    error = first.error()
    assert error.kind == ContainerError.RECOVERABLE, error.message
    found = re.search(r"pre-empted after step (\d+); ", error.message)
    assert found is not None, error.message
    step = int(found[1])
    assert f"step_{step}/COMPLETE" in first.names("checkpoints")
    assert f"{stage}: done" not in first.text
    return step


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("storage", ["disk", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_pre_empted_warm_start_is_tried_again_and_goes_on(
    inputs: Inputs,
    registered: Registered,
    storage: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    variables = request.getfixturevalue("s3") if storage == "s3" else {}
    where = f"s3://flyte/{tmp_path.name}" if storage == "s3" else str(tmp_path)
    args = list(registered.task("sft_stage").container.args)
    first, second, whole = struck_and_tried_again("sft", inputs, args, where, variables)
    step = assert_recoverable(first, "sft")
    total = inputs.plan.sft.config.max_steps
    assert 0 < step < total
    assert whole.steps("sft/loss") == list(range(1, total + 1)), whole.text
    assert second.steps("sft/loss") == list(range(step + 1, total + 1)), second.text
    assert second.digest("model.safetensors") == whole.digest("model.safetensors")
    assert tried_after_the_end(second, whole).steps("sft/loss") == [total], "the last, once more"


def done(attempt: Attempt) -> list[int]:
    """The steps that an attempt at `rl` did itself."""
    return [int(step) for step in re.findall(r"^rl +(\d+)/\d+ ", attempt.text, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.slow
def test_a_pre_empted_rl_run_is_tried_again_and_goes_on(
    inputs: Inputs, registered: Registered, tmp_path: Path
) -> None:
    args = list(registered.task("rl_stage").container.args)
    first, second, whole = struck_and_tried_again("rl", inputs, args, str(tmp_path), {})
    step = assert_recoverable(first, "rl")
    total = inputs.plan.rl.config.trainer.total_training_steps
    assert 0 < step < total
    assert done(second) == list(range(step + 1, total + 1)), second.text
    assert second.steps("reward/mean") == list(range(1, total + 1)), "the curve is whole"
    assert second.digest("model.safetensors") == whole.digest("model.safetensors")
    rows = [pd.read_parquet(one.artifact() / "metrics.parquet") for one in (second, whole)]
    for frame in rows:
        assert list(frame["step"]) == list(range(1, total + 1))
    one, two = (frame[[name for name in frame if not name.startswith(TIMES)]] for frame in rows)
    pd.testing.assert_frame_equal(one, two, check_exact=True)
    assert done(tried_after_the_end(second, whole)) == []


DEADLINE_S = 15.0


@pytest.fixture(params=["local", "ray"])
def running(place: Place, request: pytest.FixtureRequest) -> subprocess.Popen[str]:
    """A run of an hour, at its second step; in a process group of its own."""
    long = {"rl": {"trainer": {"total_training_steps": 10_000, "placement": request.param}}}
    command = ["run", str(WORKFLOW), "rlhf", "--config", settings(long)]
    process = subprocess.Popen(
        [sys.executable, "-c", PYFLYTE, *command],
        env=place.environment({"RAY_TMPDIR": "/tmp"}),
        cwd=place.root / "work",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    watchdog = threading.Timer(400, process.kill)
    watchdog.start()
    for line in process.stdout:
        if line.startswith("rl    2/"):
            break
    watchdog.cancel()
    assert process.poll() is None, "the run ended before its second step"
    return process


def is_ray_worker(process: psutil.Process) -> bool:
    try:
        return "ray::" in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


@pytest.mark.slow
def test_ctrl_c_ends_cleanly(
    place: Place, running: subprocess.Popen[str], request: pytest.FixtureRequest
) -> None:
    family = psutil.Process(running.pid).children(recursive=True)
    on_ray = any(is_ray_worker(child) for child in family)
    assert on_ray == ("ray" in request.node.callspec.id)
    started = time.monotonic()
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert time.monotonic() - started < DEADLINE_S
    assert running.returncode == 130

    assert "rl: interrupted; run again to continue: earlier stages are cached\n" in out
    assert re.search(
        r"interrupted in step \d+; started again, the run continues from the beginning", out
    )
    assert "Traceback" not in out + err
    assert len([line for line in err.splitlines() if line.strip() and "sft: " not in line]) <= 1

    _, alive = psutil.wait_procs(family, timeout=5)
    assert [child.name() for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
    assert list((place.artifacts / ".staging").glob("*")) == []
    assert not (place.artifacts / "artifacts" / "rl").exists()
    with sqlite3.connect(place.root / "mlflow.db") as database:
        runs = dict(database.execute("select name, status from runs").fetchall())
    statuses = {name.split("-")[0]: status for name, status in runs.items()}
    assert statuses == {
        "rlhf": "KILLED",
        "dataset": "FINISHED",
        "reward_audit": "FINISHED",
        "sft": "FINISHED",
        "rl": "KILLED",
    }


def test_other_start_weights_and_limits_have_folders_of_their_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run that is started again after it was killed resumes from its own alone."""
    from tasks.stages import rl_stage, sft_stage

    made = prepared_inputs(place)
    monkeypatch.setattr(Stage, "delete_local_checkpoints", lambda self: None)  # as if it was killed
    sft, rl = made.plan.sft, made.plan.rl
    short = sft.config.model_copy(update={"max_steps": 2})
    trainer = rl.config.trainer.model_copy(update={"total_training_steps": 1})
    brief = rl.config.model_copy(update={"trainer": trainer})
    common: dict[str, Any] = {"run": made.plan.run, "dataset": made.dataset}
    with place.entered():
        for content in ("a" * 64, "b" * 64):
            changes = {"start_digest": content, "config": short}
            warm = sft_stage(settings=sft.model_copy(update=changes), **common)
            assert read_manifest(str(warm)).config["start_digest"] == content
        for longest in (8, 4):
            data = rl.data.model_copy(update={"max_response_length": longest})
            settings = rl.model_copy(update={"data": data, "config": brief})
            trained = rl_stage(warm_start=made.warm_start, settings=settings, **common)
            assert read_manifest(str(trained)).config["max_response_length"] == longest
    for kind in ("sft", "rl"):
        assert len(list((place.artifacts / "checkpoints" / kind).iterdir())) == 2, kind


def test_records_of_steps_outlive_the_checkpoints(tmp_path: Path) -> None:
    stage = SimpleNamespace(_local_checkpoints=lambda: tmp_path / "run")
    for name in ("step_20/a", "rollouts/b", "recorded/step_3/step.pt"):
        (tmp_path / "run" / name).parent.mkdir(parents=True)
        (tmp_path / "run" / name).touch()
    (tmp_path / "run" / ".lock-1.json").touch()
    Stage.delete_local_checkpoints(cast(Stage, stage))
    left = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert left == [tmp_path / "run" / "recorded" / "step_3" / "step.pt"]
    shutil.rmtree(tmp_path / "run" / "recorded")
    Stage.delete_local_checkpoints(cast(Stage, stage))
    assert not (tmp_path / "run").exists()
