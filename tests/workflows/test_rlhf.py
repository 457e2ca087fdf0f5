"""The main workflow: end to end, its cache, its store."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from attempts import s3_variables
from flyte_runs import (
    ON_RAY,
    REPOSITORY,
    SECRET,
    STAGES,
    TINY,
    WORKFLOW,
    Finished,
    Outcome,
    Place,
    TriedAgain,
    settings,
)
from mlflow import MlflowClient
from mlflow.entities import Run
from tracker_files import tensorboard_points
from transformers import AutoModelForCausalLM

from engine.config import digest
from engine.data.contract import EVALUATION_ROWS, check, check_disjoint
from engine.lineage.__main__ import main as lineage
from engine.models import require_model_folder
from engine.stages.plan import pin_named_content
from engine.storage.artifacts import read_manifest, verify
from engine.storage.digests import hash_file
from tasks.inputs import RLHFConfig

STEPS = TINY["rl"]["trainer"]["total_training_steps"]


SPLITS = ("sft_train", "sft_validation", "train", "validation", "test")


@pytest.fixture
def client(finished: Finished) -> MlflowClient:
    return MlflowClient(finished.place.tracking_uri, finished.place.tracking_uri)


@pytest.fixture
def runs(finished: Finished, client: MlflowClient) -> dict[str, Run]:
    """The parent run (`pipeline`) and its nested ones, by name."""
    parent = client.get_run(finished.outcome.summary["mlflow"]["run_id"])
    nested = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    )
    names = {run.info.run_name: run for run in nested}
    assert len(names) == len(nested), "a stage has two runs"
    return {"pipeline": parent, **names}


def test_nothing_that_a_run_leaves_or_prints_holds_a_credential(finished: Finished) -> None:
    assert SECRET in finished.config
    assert SECRET not in finished.outcome.text
    assert "MLflow run http://mlflow.example:5000/#/experiments/" in finished.outcome.out
    files = [path for path in finished.place.root.rglob("*") if path.is_file()]
    assert {"summary.json", "manifest.json", "mlflow.db"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_the_summary_holds_what_was_promised(finished: Finished) -> None:
    summary = finished.outcome.summary
    rows = {
        name: pd.read_parquet(finished.artifact("evaluation") / f"rows_{name}.parquet")
        for name in ("warm_start", "rl")
    }
    rates = {name: frame["greedy_correct"].mean() for name, frame in rows.items()}
    assert summary["pass_at_1"] == pytest.approx(rates)
    assert summary["gain"] == pytest.approx(rates["rl"] - rates["warm_start"])
    low, high = summary["gain_interval"]
    assert low <= summary["gain"] <= high
    settings = pin_named_content(RLHFConfig.model_validate_json(finished.config))
    assert summary["config_digest"] == digest(settings)
    assert set(summary["seconds"]) == {*STAGES, "total"}
    assert all(seconds > 0 for seconds in summary["seconds"].values())
    assert sum(summary["seconds"][s] for s in STAGES) < summary["seconds"]["total"]
    assert summary["unchanged"] == []
    for stage in STAGES:
        assert verify(finished.artifact(stage)).digest == summary["digests"][stage]


def test_the_artifacts_chain_from_the_promotion_to_the_source(finished: Finished) -> None:
    digests = finished.outcome.summary["digests"]
    parents = {
        stage: {p.name: p.digest for p in read_manifest(finished.artifact(stage)).parents}
        for stage in STAGES
    }
    data, warm_start, policy = (
        {n: digests[s]}
        for n, s in zip(("dataset", "warm_start", "policy"), ("dataset", "sft", "rl"), strict=True)
    )
    assert list(parents["dataset"]) == ["source"]
    assert parents["sft"] == data
    assert parents["rl"] == data | warm_start
    audit = {"reward_audit": digests["reward_audit"]}
    assert parents["reward_audit"] == data
    assert parents["evaluation"] == data | warm_start | policy | audit
    assert parents["promotion"] == data | policy | {"evaluation": digests["evaluation"]}


def test_the_lineage_command_walks_from_the_model_to_the_source(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    with finished.place.entered():
        status = lineage([str(finished.artifact("rl")), "--verify"])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    for stage in ("dataset", "sft", "rl"):
        assert finished.outcome.summary["digests"][stage][:12] in shown.out
    assert re.search(r"source \w{12} arithmetic://", shown.out)
    assert "verified" in shown.err


def test_mlflow_has_one_parent_and_one_nested_run_a_stage(
    finished: Finished, runs: dict[str, Run]
) -> None:
    assert set(runs) == {"pipeline", *STAGES}
    parent = runs["pipeline"]
    assert parent.info.run_id == finished.outcome.summary["mlflow"]["run_id"]
    for stage in STAGES:
        assert runs[stage].data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert read_manifest(finished.artifact(stage)).mlflow_run == runs[stage].info.run_id
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert parent.data.metrics["gain"] == finished.outcome.summary["gain"]


def test_mlflow_has_parameters_and_a_value_a_step(
    client: MlflowClient, runs: dict[str, Run]
) -> None:
    sections = runs["pipeline"].data.params
    assert sections.keys() == RLHFConfig.model_fields.keys(), "one parameter a section"
    assert json.loads(sections["data"])["test_size"] == 32
    assert runs["rl"].data.params["rl.rollout.n"] == "4"
    rewards = client.get_metric_history(runs["rl"].info.run_id, "reward/mean")
    assert sorted(point.step for point in rewards) == list(range(1, STEPS + 1))
    for stage in ("sft", "rl"):
        names = [name.replace("/", "_") for name in runs[stage].data.metrics]
        assert len(set(names)) == len(names), f"{stage} has a metric under two names"
    losses = client.get_metric_history(runs["sft"].info.run_id, "sft/loss")
    assert sorted(point.step for point in losses) == list(range(1, TINY["sft"]["max_steps"] + 1))


def test_the_loggers_that_are_named_have_each_step(finished: Finished) -> None:
    folder = finished.place.artifacts / "runs" / finished.outcome.summary["run_id"]
    for stage, metric, last in (
        ("sft", "sft/loss", TINY["sft"]["max_steps"]),
        ("rl", "reward/mean", STEPS),
    ):
        lines = (folder / stage / "metrics.jsonl").read_text().splitlines()
        rows = {row["step"]: row[metric] for row in map(json.loads, lines)}
        assert list(rows) == list(range(1, last + 1))
        points = dict(tensorboard_points(folder / stage / "tensorboard", metric))
        assert points == pytest.approx(rows)
        assert f"{stage}: files of metrics are in {folder / stage}" in finished.outcome.out


def test_mlflow_has_the_data_by_digest_and_the_checkpoints(
    finished: Finished, client: MlflowClient, runs: dict[str, Run]
) -> None:
    folder = finished.artifact("dataset")
    read = {
        "dataset": SPLITS,
        "sft": ("sft_train", "sft_validation"),
        "rl": ("train", "validation"),
        "evaluation": ("test",),
    }
    for stage, names in read.items():
        recorded = runs[stage].inputs
        assert recorded is not None
        inputs = {i.dataset.name: i.dataset.digest for i in recorded.dataset_inputs}
        assert inputs == {name: hash_file(folder / f"{name}.parquet")[:32] for name in names}
    for stage in ("sft", "rl"):
        files = client.list_artifacts(runs[stage].info.run_id, "checkpoint")
        assert {"checkpoint/model.safetensors", "checkpoint/config.json"} <= {f.path for f in files}


def test_the_champion_is_the_model_of_this_run(finished: Finished, client: MlflowClient) -> None:
    champion = client.get_model_version_by_alias("hybridflyte-policy", "champion")
    assert champion.tags["artifact_digest"] == finished.outcome.summary["digests"]["rl"]
    assert finished.outcome.summary["promotion"]["promoted"] is True


def test_the_evaluation_rows_keep_their_schema(finished: Finished) -> None:
    for name in ("warm_start", "rl"):
        rows = pd.read_parquet(finished.artifact("evaluation") / f"rows_{name}.parquet")
        check(rows, EVALUATION_ROWS, name)
        assert len(rows) == TINY["data"]["test_size"]
        assert set(rows["model"]) == {name}


def test_the_test_split_is_in_no_other(finished: Finished) -> None:
    folder = finished.artifact("dataset")
    frames = {name: pd.read_parquet(folder / f"{name}.parquet") for name in SPLITS}
    check_disjoint(frames)
    asked = [prompt[0]["content"] for prompt in frames["test"]["prompt"]]
    evaluated = pd.read_parquet(finished.artifact("evaluation") / "rows_rl.parquet")["prompt"]
    assert sorted(asked) == sorted(evaluated)


def test_a_report_and_a_deck_are_written(finished: Finished) -> None:
    summary = finished.outcome.summary
    verdict = f"hybridflyte-policy version {summary['promotion']['model_version']} is now champion"
    first = (finished.artifact("evaluation") / "report.html").read_text()
    last = Path(summary["report"]).read_text()
    for page in (first, last):
        assert "</html>" in page
        assert page.count("<svg") >= 6
        assert summary["run_id"] in page
        assert summary["digests"]["rl"] in page
    assert verdict in last
    assert verdict not in first, "the evaluation is made before the promotion"
    assert summary["digests"]["rl"] in Path(summary["report"]).with_name("lineage.html").read_text()
    decks = [path.read_text() for path in (finished.place.root / "tmp").rglob("deck.html")]
    assert any("Evaluation" in deck for deck in decks)
    assert any(verdict in deck and "Lineage" in deck for deck in decks)


def test_the_rollouts_of_the_run_can_be_looked_at(
    finished: Finished, client: MlflowClient, runs: dict[str, Run]
) -> None:
    folder = finished.artifact("rl") / "rollouts"
    names = sorted(path.name for path in folder.iterdir())
    assert {"rollouts.html", "train_000001.parquet", f"train_{STEPS:06d}.parquet"} <= set(names)
    tracked = client.list_artifacts(runs["rl"].info.run_id, "rollouts")
    assert sorted(file.path for file in tracked) == [f"rollouts/{name}" for name in names]
    page = (folder / "rollouts.html").read_text()
    decks = [path.read_text() for path in (finished.place.root / "tmp").rglob("deck.html")]
    assert any(page in deck for deck in decks)


def test_the_output_is_ours_alone(finished: Finished) -> None:
    assert finished.outcome.foreign == []


def test_a_line_a_step_says_how_it_goes(finished: Finished) -> None:
    lines = re.findall(r"^rl +(\d+)/(\d+) · (.*)$", finished.outcome.out, re.MULTILINE)
    assert [(int(step), int(total)) for step, total, _ in lines] == [
        (step, STEPS) for step in range(1, STEPS + 1)
    ]
    for word in ("reward", "KL", "entropy", "length", "clip", "grad", "tok/s", "left"):
        assert all(word in line for _, _, line in lines)


def test_the_table_says_where_everything_is(finished: Finished) -> None:
    summary = finished.outcome.summary
    table = finished.outcome.out[finished.outcome.out.index("RLHF run ") :]
    for text in (
        str(finished.artifact("rl")),
        summary["report"],
        summary["mlflow"]["run_id"],
        summary["mlflow"]["url"],
        "python -m engine.lineage",
    ):
        assert text in table
    assert Path(finished.outcome.out.strip().splitlines()[-1]).name == "summary.json"
    assert json.dumps(summary["promotion"]["model_version"]).strip('"') in table


def test_nothing_half_written_is_left(finished: Finished) -> None:
    assert list((finished.place.artifacts / ".staging").glob("*")) == []
    assert list((finished.place.root / "work").iterdir()) == []


def test_an_unchanged_run_recomputes_nothing(finished: Finished) -> None:
    started = time.monotonic()
    again = finished.place.run("--config", finished.config)
    assert again.code == 0, again.text
    # Promotion compares with the champion of the day, so it alone runs; here it is that champion.
    assert again.stages == ["promotion"]
    assert "is the champion already" in again.out
    assert time.monotonic() - started < finished.seconds
    before, after = finished.outcome.summary, again.summary
    assert after["unchanged"] == ["dataset", "sft", "reward_audit", "rl", "evaluation"]
    for fact in ("pass_at_1", "gain", "gain_interval", "config_digest"):
        assert after[fact] == before[fact]
    assert {k: v for k, v in after["digests"].items() if k != "promotion"} == {
        k: v for k, v in before["digests"].items() if k != "promotion"
    }


def test_a_dry_run_says_what_is_cached_and_does_nothing(finished: Finished) -> None:
    command = ("run", str(WORKFLOW), "rlhf", "--config", finished.config)
    before = sorted(finished.place.artifacts.rglob("*"))
    planned = finished.place.pyflyte(*command, variables={"HYBRIDFLYTE_DRY_RUN": "1"})
    assert planned.code == 0, planned.text
    assert "run dry-run: config" in planned.out
    assert "cached    dataset, sft, reward_audit, rl, evaluation\n" in planned.out
    assert "\nto do     promotion and" in planned.out
    assert sorted(finished.place.artifacts.rglob("*")) == before


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
    assert outcome.summary["unchanged"] == ["dataset", "sft", "reward_audit"]
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
            for path in (REPOSITORY / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
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


NAME = "hybridflyte-policy"


@pytest.fixture
def store() -> Iterator[dict[str, str]]:
    """A real S3 server, and the variables by which Flyte names it to pods."""
    with s3_variables("shared") as variables:
        yield {**variables, "HYBRIDFLYTE_STORE": "s3://shared/team"}


def elsewhere(folder: Path, place: Place, store: dict[str, str], *words: str) -> Outcome:
    """A command on a machine that has the store and MLflow's address, and no artifact."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "engine.lineage", *words],
        cwd=folder,
        env=place.environment({**store, "HYBRIDFLYTE_HOME": str(folder / "home")}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_s_lineage_is_verified_from_the_store_alone(
    place: Place, store: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in store.items():
        monkeypatch.setenv(variable, value)
    for variable in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    outcome = place.run("--config", settings())
    assert outcome.code == 0, outcome.text
    digests = outcome.summary["digests"]
    folders = {stage: Path(outcome.summary["artifacts"][stage]) for stage in STAGES}
    addresses = {
        stage: f"s3://shared/team/artifacts/{stage}/{folders[stage].name}" for stage in STAGES
    }
    for stage in STAGES:
        assert f"{stage}: done in" in outcome.out
        assert addresses[stage] in outcome.out
        assert read_manifest(addresses[stage]) == read_manifest(folders[stage])
        for parent in read_manifest(addresses[stage]).parents:
            assert parent.kind == "source" or parent.uri in addresses.values()
    client = MlflowClient(place.tracking_uri, place.tracking_uri)
    # Whether or not so small a model was promoted.
    client.set_registered_model_alias(NAME, "champion", "1")
    champion = client.get_model_version_by_alias(NAME, "champion")
    assert champion.tags["artifact_uri"] == addresses["rl"]
    assert champion.tags["evaluation_uri"] == addresses["evaluation"]

    verified = elsewhere(tmp_path / "there", place, store, "verify", f"models:/{NAME}@champion")
    assert verified.code == 0, verified.text
    shown = elsewhere(tmp_path / "there", place, store, "show", digests["dataset"][:16])
    assert shown.code == 0, shown.text
    for stage in ("sft", "rl", "evaluation"):
        assert digests[stage][:12] in shown.out
    assert not (tmp_path / "there" / "home").exists()

    again = place.run("--config", settings())
    assert again.code == 0, again.text
    assert again.stages == ["promotion"], "what the store holds is not made again"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_both_stages_train_adapters_and_leave_plain_models(tried_again: TriedAgain) -> None:
    artifacts = tried_again.again.summary["artifacts"]
    warm, policy = (Path(artifacts[stage]) for stage in ("sft", "rl"))
    before = weights(tried_again.start)
    for folder, earlier in ((warm, before), (policy, weights(warm))):
        after = weights(folder)
        assert after.keys() == before.keys()
        for name, tensor in after.items():
            assert torch.equal(tensor, earlier[name]) == ("_proj." not in name), name
        require_model_folder(folder / "adapter")
