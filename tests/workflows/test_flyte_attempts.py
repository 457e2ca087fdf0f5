"""Attempts at a task as a Flyte pod makes them: the registered command, told to end, tried again.

A pod that is taken away gets SIGTERM. What it leaves must be an error that Flyte tries again, and
checkpoints from which the next attempt resumes.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from attempts import Attempt, Inputs, prepared_inputs, s3_variables
from flyte_runs import Place
from flyteidl.core.errors_pb2 import ContainerError
from protobufs import Registered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # four processes, two of them at once

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
    assert re.search(r"is at step (\d+) of \1 already", third.text), third.text
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
    total = inputs.plan.sft.max_steps
    assert 0 < step < total
    assert whole.steps("sft/loss") == list(range(1, total + 1)), whole.text
    assert second.steps("sft/loss") == list(range(step + 1, total + 1)), second.text
    assert second.digest("model.safetensors") == whole.digest("model.safetensors")
    assert tried_after_the_end(second, whole).steps("sft/loss") == [total], "the last, once more"


def done(attempt: Attempt) -> list[int]:
    """The steps that an attempt at `rl` did itself."""
    return [int(step) for step in re.findall(r"^rl +(\d+)/\d+ ", attempt.text, re.MULTILINE)]


@pytest.mark.slow
def test_a_pre_empted_rl_run_is_tried_again_and_goes_on(
    inputs: Inputs, registered: Registered, tmp_path: Path
) -> None:
    args = list(registered.task("rl_stage").container.args)
    first, second, whole = struck_and_tried_again("rl", inputs, args, str(tmp_path), {})
    step = assert_recoverable(first, "rl")
    total = inputs.plan.rl.trainer.total_training_steps
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
