"""Local runs on Flyte 2: promoted, cached, interrupted, approved; and flytekit 1 beside them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import flyte
import pytest
import yaml
from click.testing import CliRunner
from flyte._persistence._db import LocalDB
from flyte_runs import REPOSITORY, REQUIRED, REWARD, STAGES, Outcome, Place, settings
from mlflow import MlflowClient

from engine.lineage import lookup
from engine.stages.stage import CAUSE_TAG
from engine.storage.artifacts import read_manifest
from workflows.flyte2 import agents, evaluate_only, preference, retraining
from workflows.flyte2.host import Settings

pytestmark = pytest.mark.usefixtures("without_drawings")

OF_FLYTE_2 = {"dataset": "dataset", "policy": "rl", "evaluation": "evaluation"}
STEPS = {"rl": {"trainer": {"total_training_steps": 8, "save_freq": 1}}}
GUESSING = yaml.safe_load((REPOSITORY / "engine/config/presets/guessing_agent.yaml").read_text())
PREFERENCES: dict[str, Any] = {
    "sft": {"max_steps": 60},
    "pairs": {"n": 4, "prompts": 24, "reward": {"name": "cosine_length"}, "rounds": 2},
    "preference": {"max_steps": 2},
    "reward_model": {"max_steps": 2},
}
RLHF = ("run", "--local", "workflows/flyte2/rlhf.py", "rlhf")


@contextlib.contextmanager
def lives_in(place: Place, **variables: str) -> Iterator[None]:
    """Let this process live there, with a local cache of its own."""
    with mock.patch.dict(os.environ, {**place.variables, **variables}):
        LocalDB._conn = LocalDB._conn_sync = None
        try:
            with contextlib.chdir(REPOSITORY):  # the command line wants the file below it
                yield
        finally:
            LocalDB._conn = LocalDB._conn_sync = None


def rlhf(place: Place, *arguments: str, answers: str = "", **variables: str) -> Outcome:
    """Run `flyte run --local workflows/flyte2/rlhf.py rlhf …` in this process."""
    from flyte.cli.main import main

    with lives_in(place, **variables):
        done = CliRunner().invoke(main, [*RLHF, *arguments], input=answers)
    return Outcome(done.exit_code, done.stdout, done.stderr)


def run(place: Place, task: Any, **inputs: Any) -> Any:
    """Run a task in this process; return its output."""
    with lives_in(place):
        made = flyte.with_runcontext(mode="local").run(task, **inputs)
    return made.outputs()[0]


def summary(place: Place) -> dict[str, Any]:
    """The newest run's summary.json."""
    newest = max(place.artifacts.glob("runs/*/summary.json"), key=lambda path: path.stat().st_mtime)
    found: dict[str, Any] = json.loads(newest.read_text())
    return found


def said(outcome: Outcome) -> str:
    """What a command printed, without boxes and colours, on one line."""
    plain = re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯─]", "", outcome.text)
    return " ".join(plain.split())


@dataclass(frozen=True)
class Runs:
    """The same command three times, once on flytekit 1 after them, all in one place."""

    place: Place
    interrupted: str  # what the first printed, which got a SIGTERM while it trained
    first: Outcome  # the next, which goes on
    found: dict[str, Any]  # its summary
    again: Outcome
    found_again: dict[str, Any]
    on_flytekit: Outcome


def interrupt(place: Place, config: str) -> str:
    """Run the command in a process of its own, and end it after a step of RL."""
    program = "from flyte.cli.main import main; main()"
    log = place.root / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *RLHF, "--config", config],
            env=place.environment(),
            cwd=REPOSITORY,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 300
        while not re.search(r"^rl +\d/8", log.read_text(), re.MULTILINE):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    return log.read_text()


@pytest.fixture(scope="module")
def runs(new_place: Callable[[], Place], without_drawings: None) -> Runs:
    place, config = new_place(), settings(STEPS)
    interrupted = interrupt(place, config)
    first = rlhf(place, "--config", config)
    assert first.code == 0, interrupted + first.text
    found = summary(place)
    shutil.rmtree(found["artifacts"]["sft"])
    again = rlhf(place, "--config", config)
    assert again.code == 0, again.text
    found_again = summary(place)
    on_flytekit = place.run("--config", config)
    assert on_flytekit.code == 0, on_flytekit.text
    return Runs(place, interrupted, first, found, again, found_again, on_flytekit)


def test_an_interrupted_run_goes_on(runs: Runs) -> None:
    saved = re.search(r"pre-empted after step (\d)", runs.interrupted)
    assert saved is not None, runs.interrupted
    assert "Traceback" not in runs.interrupted
    assert runs.first.stages == ["rl", "evaluation", "promotion"]
    assert f"step {saved[1]}\n" in runs.first.out
    assert re.findall(r"^rl +(\d)/8", runs.first.out, re.MULTILINE)[0] == str(int(saved[1]) + 1)
    client = MlflowClient(runs.place.tracking_uri)
    found = client.search_runs(["1"], "attributes.status = 'KILLED'")
    assert "rlhf" in {run.info.run_name.split("-")[0] for run in found}


def test_a_run_promotes_a_model(runs: Runs) -> None:
    assert runs.found["promotion"]["promoted"]
    assert "Completed Local Run" in runs.first.out
    assert "Traceback" not in runs.first.text
    folder = Path(runs.found["report"]).parent
    assert {path.name for path in folder.iterdir()} >= {"report.html", "lineage.html"}
    client = MlflowClient(runs.place.tracking_uri)
    champion = client.get_model_version_by_alias("hybridflyte-policy", "champion")
    assert champion.tags["artifact_uri"] == runs.found["artifacts"]["rl"]
    parent = client.get_run(runs.found["mlflow"]["run_id"])
    assert parent.info.status == "FINISHED"


def test_its_reports_are_the_pages_of_decks(runs: Runs) -> None:
    (where,) = re.findall(r"Path: (\S+)", runs.first.out)
    pages = "".join(path.read_text() for path in Path(where).rglob("report.html"))
    for tab in ("Run", "Result", "Evaluation", "Decision", "Lineage"):
        assert f">{tab}</li>" in pages, tab


def test_a_second_run_hits_but_for_what_was_deleted(runs: Runs) -> None:
    """The warm start is made again, the same; what was made of it is a hit."""
    assert "sft: its result was deleted from the disk and is made again" in runs.again.out
    assert runs.again.stages == ["sft", "promotion"]
    assert runs.found_again["unchanged"] == ["dataset", "reward_audit", "rl", "evaluation"]
    assert runs.found_again["digests"]["sft"] == runs.found["digests"]["sft"]
    assert "is the champion already" in runs.again.out


def test_both_fronts_make_the_same(runs: Runs) -> None:
    """Models and figures to the bit; the model is champion already, whichever front made it."""
    one, two = runs.on_flytekit.summary, runs.found
    assert runs.on_flytekit.stages == list(STAGES), "each front has a cache of its own"
    for stage, file in (
        ("dataset", "train.parquet"),
        ("sft", "model.safetensors"),
        ("rl", "model.safetensors"),
        ("evaluation", "rows_rl.parquet"),
    ):
        entries = [read_manifest(found["artifacts"][stage]).files[file] for found in (one, two)]
        assert entries[0] == entries[1], stage
    assert one["pass_at_1"] == two["pass_at_1"]
    manifests = [read_manifest(found["artifacts"]["rl"]) for found in (one, two)]
    assert manifests[0].inputs_digest == manifests[1].inputs_digest


def test_one_front_takes_what_the_other_made(runs: Runs) -> None:
    """flytekit promotes what Flyte 2 evaluated, and lineage shows both."""
    made = runs.found["artifacts"]
    inputs = [f"--{name}={made[kind]}" for name, kind in OF_FLYTE_2.items()]
    command = ("run", str(REPOSITORY / "workflows" / "promote_only.py"), "promote_only")
    outcome = runs.place.invoke(*command, "--config", settings(STEPS), *inputs)
    assert outcome.code == 0, outcome.text
    with lives_in(runs.place):
        graph = lookup.review([made["evaluation"]]).graph
    promotions = [node for node in graph.nodes.values() if node.kind == "promotion"]
    executions = {node.draft.flyte_execution for node in promotions}
    assert runs.found["run_id"] in executions
    assert len(executions) == 3  # both runs on Flyte 2, and the one on flytekit


def test_a_model_of_flytekit_is_evaluated_on_flyte_2(runs: Runs) -> None:
    """By two tasks beside each other, whose parts are joined."""
    made = runs.on_flytekit.summary["artifacts"]
    outcome = run(
        runs.place,
        evaluate_only.evaluate_only,
        config=Settings(settings(STEPS, {"evaluate": {"map_parts": 2}})),
        candidate=made["rl"],
        baseline=made["sft"],
    )
    manifest = read_manifest(outcome.path)
    assert {p.name: p.digest for p in manifest.parents}["policy"] == read_manifest(
        made["rl"]
    ).digest
    assert (
        manifest.files["rows_rl.parquet"]
        == read_manifest(made["evaluation"]).files["rows_rl.parquet"]
    )


def test_a_night_without_new_data_is_skipped(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "2026-11-01").mkdir()
    outcome = run(
        runs.place,
        retraining.retraining,
        kickoff=datetime.now(UTC),
        config=Settings(settings()),
        path=str(tmp_path),
    )
    assert "nothing new in" in json.loads(Path(outcome.path).read_text())["skipped"]


def test_a_stage_that_fails_ends_in_one_sentence(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quota_reward.py").write_text(REWARD)
    (tmp_path / "broken").touch()
    monkeypatch.syspath_prepend(tmp_path)
    reward = {"rl": {"reward": {"name": "quota_reward:score", "on_error": "fail"}}}
    outcome = rlhf(place, "--config", settings(reward))
    sys.modules.pop("quota_reward", None)
    assert outcome.code == 1
    assert "the judge has no quota left" in said(outcome)
    assert outcome.out.count("Execution failed") == 1
    assert "Traceback" not in outcome.text
    client = MlflowClient(place.tracking_uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "hybridflyte"]
    found = {
        run.info.run_name.split("-")[0]: run
        for run in client.search_runs([experiment.experiment_id])
    }
    assert {name: run.info.status for name, run in found.items()} == {
        "rlhf": "FAILED",
        "rl": "FAILED",
        **dict.fromkeys(("dataset", "sft", "reward_audit"), "FINISHED"),
    }
    assert "no quota left" in found["rlhf"].data.tags[CAUSE_TAG]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", '{"sed": 1}'], "unknown setting 'sed'"),
        (["--config", "nope.yaml"], "config file nope.yaml does not exist"),
        (["--model", "/nowhere"], "model.path='/nowhere' does not exist"),
        (["--profile", "huge"], "profile='huge' is none of"),
    ],
)
@pytest.mark.parametrize("dry_run", ["", "1"])
def test_bad_input_ends_in_a_sentence(
    place: Place, arguments: list[str], words: str, dry_run: str
) -> None:
    outcome = rlhf(place, *arguments, HYBRIDFLYTE_DRY_RUN=dry_run)
    assert outcome.code == 1
    assert words in said(outcome)
    assert "Traceback" not in outcome.text
    assert "retrying" not in outcome.text
    assert outcome.stages == []


def test_a_dry_run_plans_and_does_nothing(runs: Runs) -> None:
    before = sorted(runs.place.artifacts.rglob("*"))
    program = "from flyte.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *RLHF, "--config", settings(STEPS)],
        env=runs.place.environment() | {"HYBRIDFLYTE_DRY_RUN": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "run dry-run: config" in done.stdout
    assert "dry run, nothing is computed" in done.stdout
    assert sorted(runs.place.artifacts.rglob("*")) == before


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_person_approves(place: Place, runs: Runs, answer: str) -> None:
    """In a place where all but the promotion is cached."""
    shutil.copytree(runs.place.root, place.root, dirs_exist_ok=True)
    config = settings(STEPS, REQUIRED, {"promote": {"model_name": "asked"}})
    outcome = rlhf(place, "--config", config, answers=f"{answer}\n")
    assert outcome.code == 0, outcome.text
    asked = "make asked version 1 the champion in place of version none"
    assert asked in said(outcome)
    decision = summary(place)["promotion"]
    assert decision["promoted"] == (answer == "y")
    assert decision["waits_for_approval"] == (answer == "n")


@pytest.mark.slow
@pytest.mark.parametrize("task", [preference.preference, preference.reward_model, agents.agents])
def test_the_other_pipelines_run(place: Place, task: Any) -> None:
    config = settings(PREFERENCES)
    if task is agents.agents:
        steps = {"total_training_steps": 2, "train_batch_size": 4, "placement": "local"}
        little = {"rl": {"trainer": steps}, "sft": {"max_steps": 6, "train_batch_size": 32}}
        config = settings(little, base=GUESSING)
    outcome = run(place, task, config=Settings(config))
    assert Path(outcome.path).exists()
