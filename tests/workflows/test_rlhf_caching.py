"""What runs again, and what does not, after which change."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from flyte_runs import ON_RAY, REPOSITORY, STAGES, WORKFLOW, Finished, Place, settings

from engine.storage.artifacts import verify


@pytest.fixture(scope="module")
def ran(new_place: Callable[[], Place]) -> Place:
    """A place where the tiny job ran once in this process."""
    place = new_place()
    outcome = place.run("--config", settings())
    assert outcome.code == 0, outcome.text
    assert outcome.stages == list(STAGES)
    return place


@pytest.mark.slow
def test_a_changed_rl_setting_keeps_data_and_warm_start(finished: Finished) -> None:
    change = {"rl": {"actor": {"kl_loss_coef": 0.002}}}
    command = ("run", str(WORKFLOW), "rlhf", "--config", settings(ON_RAY, change))
    outcome = finished.place.pyflyte(*command)
    assert outcome.code == 0, outcome.text
    assert "rl: grpo on local" in finished.outcome.out
    assert "rl: grpo on ray" in outcome.out
    assert [line for line in outcome.foreign if not line.startswith("plan: ")] == []
    assert outcome.stages == ["rl", "evaluation", "promotion"]
    assert outcome.summary["cached"] == ["dataset", "sft"]
    assert outcome.summary["digests"]["sft"] == finished.outcome.summary["digests"]["sft"]


@pytest.mark.slow
def test_changed_settings_of_evaluation_keep_the_models(ran: Place) -> None:
    outcome = ran.run("--config", settings({"evaluate": {"temperature": 0.5}}))
    assert outcome.stages == ["evaluation", "promotion"]


@pytest.mark.slow
def test_another_seed_recomputes_everything(ran: Place) -> None:
    outcome = ran.run("--config", settings(), "--seed", "7")
    assert outcome.stages == list(STAGES)


@pytest.mark.slow
def test_an_edit_in_the_engine_recomputes(finished: Finished, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in tracked_files():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, target)
    edited = copy / "engine" / "algorithms" / "masked.py"
    edited.write_text(edited.read_text() + "# edited\n")
    outcome = finished.place.pyflyte(
        "run",
        str(copy / "workflows" / "rlhf.py"),
        "rlhf",
        "--config",
        settings(),
        variables={"PYTHONPATH": str(copy)},
    )
    assert outcome.code == 0, outcome.text
    assert outcome.stages == list(STAGES)
    # The data comes out equal, so it is the same artifact as before.
    before = finished.outcome.summary["digests"]
    assert outcome.summary["digests"]["dataset"] == before["dataset"]


def tracked_files() -> list[str]:
    """The sources of the project, those not committed yet included."""
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "engine",
            "examples",
            "tasks",
            "workflows",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if listed.returncode:  # an unpacked archive
        return [
            str(path.relative_to(REPOSITORY))
            for package in ("engine", "examples", "tasks", "workflows")
            for path in (REPOSITORY / package).rglob("*.py")
        ]
    return [name for name in listed.stdout.split() if (REPOSITORY / name).exists()]


@pytest.mark.parametrize("kind", ["dataset", "sft", "rl", "evaluation"])
@pytest.mark.slow
def test_a_deleted_artifact_is_made_again(ran: Place, kind: str) -> None:
    first = ran.run("--config", settings())
    folder = Path(first.summary["artifacts"][kind])
    shutil.rmtree(folder)
    outcome = ran.run("--config", settings())
    assert outcome.code == 0, outcome.text
    assert "plan: results that were deleted from the disk are made again (1)" in outcome.out
    assert outcome.stages[0] == kind
    # Made from the same data and seed, so what was not deleted still fits and is not made again.
    if kind in ("dataset", "evaluation"):
        assert outcome.stages == [kind, "promotion"]
    assert verify(Path(outcome.summary["artifacts"][kind])).kind == kind
