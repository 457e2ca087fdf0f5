"""What a finished run leaves: summary, manifests, MLflow runs, rows, report, champion, output.

And that the same command once more computes nothing.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pandas as pd
import pytest
from flyte_runs import SECRET, STAGES, TINY, Finished
from mlflow import MlflowClient
from mlflow.entities import Run
from tracker_files import tensorboard_points

from engine.config import digest
from engine.data.contract import EVALUATION_ROWS, check, check_disjoint
from engine.lineage.__main__ import main as lineage
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
    assert summary["cached"] == []
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
    assert parents["evaluation"] == data | warm_start | policy
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
    assert after["cached"] == ["dataset", "sft", "rl", "evaluation"]
    for fact in ("pass_at_1", "gain", "gain_interval", "config_digest"):
        assert after[fact] == before[fact]
    assert {k: v for k, v in after["digests"].items() if k != "promotion"} == {
        k: v for k, v in before["digests"].items() if k != "promotion"
    }
