"""Runs beside each other: command lines' real folders, a workflow's artifacts, and MLflow."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from browser import browser, find_chromium
from tiny_engine import arithmetic_rows

from engine.config import DataConfig, EvaluateConfig
from engine.errors import DataError, TrackingError
from engine.evaluation.comparability import comparable_settings
from engine.evaluation.metrics import paired_interval
from engine.evaluation.policy_steps import SCORE
from engine.evaluation.results import Judged, build_rows
from engine.runs.__main__ import main
from engine.runs.comparison import PairedGain, compare
from engine.runs.sources import RecordedRun, list_runs, read_run
from engine.samples.sample_files import SampleFolder, SampleName
from engine.storage.artifacts import Draft, local_path, publish, read_manifest, staging
from engine.tracking import Tracker
from engine.tracking.runs import RUN_TAG

ROOT = Path(__file__).parents[3]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 2)
"""


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, mlflow_store: Path
) -> Iterator[Path]:
    """The folder of two RL runs, `p/slow` and `p/fast`, of two steps with another learning rate."""
    from engine.cli.commands.main_ppo import main as main_ppo

    place = tmp_path_factory.mktemp("runs")
    shutil.copy(mlflow_store, place / "mlflow.db")
    rows = [{**row, "extra_info": {"index": i}} for i, row in enumerate(arithmetic_rows(16))]
    pd.DataFrame(rows).to_parquet(place / "train.parquet")
    (place / "parity.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place / 'mlflow.db'}")
        patch.setenv("HYBRIDFLYTE_HOME", str(place / "home"))
        for name, rate in (("slow", "1e-5"), ("fast", "5e-2")):
            words = f"""
            data.train_files={place}/train.parquet data.val_files={place}/train.parquet
            data.train_batch_size=4 data.max_response_length=6 trainer.total_training_steps=2
            actor_rollout_ref.model.path={tiny_folder} actor_rollout_ref.actor.optim.lr={rate}
            actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.rollout.n=4
            algorithm.adv_estimator=grpo custom_reward_function.path={place}/parity.py
            rl.reward.isolation=none trainer.test_freq=1 trainer.placement=local trainer.threads=1
            trainer.project_name=p trainer.experiment_name={name} trainer.logger=[jsonl,mlflow]
            """
            assert main_ppo(words.split()) == 0
        yield place / "home"


def folder(home: Path, name: str) -> Path:
    return home / "checkpoints" / "p" / name


def validation(home: Path, name: str, step: int = 2) -> pd.DataFrame:
    samples = SampleFolder(folder(home, name) / "rollouts")
    return samples.read(SampleName(step, "validation"))[0].to_pandas()


def mlflow_id(home: Path, name: str) -> str:
    return (folder(home, name) / "checkpoints" / "mlflow_run").read_text()


def test_a_run_is_read_from_its_folder(home: Path) -> None:
    run = read_run("p/fast")
    assert (run.name, run.place) == ("p/fast", str(folder(home, "fast")))
    assert run.settings["rl.actor.optim.lr"] == "0.05"
    files = f"[{home.parent / 'train.parquet'}]"
    data = {"data.train_files": files, "data.rows": "16", "steps": "2"}
    assert data.items() <= run.settings.items()
    lines = (folder(home, "fast") / "metrics.jsonl").read_text().splitlines()
    logged = {row["step"]: row["validation/reward"] for row in map(json.loads, lines)}
    assert run.metrics["validation/reward"] == logged
    assert set(logged) == {0, 1, 2}
    assert run.test == "validation at step 2"
    assert list(run.answers["correct"]) == list(validation(home, "fast")["correct"].astype(float))


def test_a_finished_run_s_samples_name_the_step_of_its_model(home: Path) -> None:
    page = (folder(home, "fast") / "rollouts" / "rollouts.html").read_text()
    (row,) = SampleFolder(folder(home, "fast") / "rollouts").read(SampleName(2, "validation"))[1][
        -1:
    ]
    assert f'"model":{row["final/step"]},' in page
    assert row["final/step"] in (1, 2)


def test_settings_and_steps_without_a_metrics_file_are_in_the_checkpoint(
    home: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder(home, "fast"), copy, ignore=shutil.ignore_patterns("metrics.jsonl"))
    run, whole = read_run(str(copy)), read_run("p/fast")
    assert run.settings == whole.settings
    assert run.metrics["actor/kl"] == whole.metrics["actor/kl"]


def test_before_its_first_checkpoint_a_run_has_no_settings_that_differ(
    home: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder(home, "fast"), tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints")
    assert compare([read_run("p/fast"), read_run(str(tmp_path))]).settings == {}


def test_a_run_is_read_from_mlflow_as_from_its_folder(home: Path) -> None:
    run, local = read_run(mlflow_id(home, "fast")), read_run("p/fast")
    assert run.name == "fast"
    shared = run.settings.keys() & local.settings.keys()
    assert len(shared) > 100
    assert {key: run.settings[key] for key in shared} == {k: local.settings[k] for k in shared}
    assert run.metrics["reward/mean"] == local.metrics["reward/mean"]
    pd.testing.assert_frame_equal(run.answers, local.answers)
    with pytest.raises(TrackingError, match="there is no MLflow store"):
        read_run(mlflow_id(home, "fast"), "sqlite:////nowhere/mlflow.db")


def test_checkpoints_of_a_workflow_s_stage_are_no_run_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, MLflow has the workflow; its stage has samples next to its checkpoints."""
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////nowhere/mlflow.db")
    stage = tmp_path / "checkpoints" / "rl" / "56c816b2eb47ec97"
    (stage / "rollouts").mkdir(parents=True)
    assert [row["run"] for row in list_runs()] == ["rl/56c816b2eb47ec97"]
    (stage / "origin.json").write_text("{}")
    assert list_runs() == []


def test_both_are_listed_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["run"]: row for row in list_runs()}
    assert list(rows) == ["p/fast", "p/slow"], "the newest first, also within a second"
    fast = rows["p/fast"]
    assert (fast["state"], fast["steps"], fast["mlflow_run"]) == (
        "finished", 2, mlflow_id(home, "fast"),
    )  # fmt: skip
    metrics = read_run("p/fast").metrics
    assert (fast["reward"], fast["validation"]) == (metrics["reward/mean"][2], metrics[SCORE][2])
    assert len(list_runs(last=1)) == 1
    assert main(["--json"]) == 0
    assert {row["run"] for row in json.loads(capsys.readouterr().out)} == set(rows)
    assert main([]) == 0
    assert "p/slow" in capsys.readouterr().out


def test_runs_of_mlflow_alone_are_listed_by_their_ids(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path))
    ids = {mlflow_id(home, name) for name in ("slow", "fast")}
    assert {row["run"] for row in list_runs()} == ids
    with pytest.raises(TrackingError):
        list_runs("sqlite:////nowhere/mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////nowhere/mlflow.db")
    assert list_runs() == []
    assert main([]) == 0
    assert "no runs in $HYBRIDFLYTE_HOME" in capsys.readouterr().out
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(home))
    untracked = {row["run"]: (row["steps"], row["validation"]) for row in list_runs()}
    score = {name: read_run(name).metrics[SCORE][2] for name in ("p/slow", "p/fast")}
    assert untracked == {name: (2, score[name]) for name in score}


def test_a_pipeline_of_mlflow_is_one_run_with_the_metrics_of_its_training(
    tmp_path: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path))
    uri = f"sqlite:///{shutil.copy(mlflow_store, tmp_path / 'mlflow.db')}"
    tracker = Tracker(uri, "pipelines")
    params, run_id = {"rl": {"lr": 0.1, "on": True}, "seed": 3}, "20261129-033126-46eb"
    pipeline = tracker.start_pipeline("rlhf-1", params, {RUN_TAG: run_id})
    for kind, value in (("sft", 9.0), ("rl", 0.5), ("evaluation", 7.0)):
        with tracker.stage(kind, pipeline) as stage:
            stage.log_metrics({"reward/mean": value}, 4)
    tracker.finish_pipeline(pipeline, metrics={"gain": 0.25})
    run = read_run(pipeline, uri)
    assert run.settings == {"rl.lr": "0.1", "rl.on": "True", "seed": "3"}
    assert run.metrics == {"reward/mean": {4: 0.5}}
    assert (run.name, run.test) == ("rlhf-1", "")
    (row,) = list_runs(uri)
    assert (row["run"], row["state"], row["gain"]) == (run_id, "finished", 0.25)
    assert (row["steps"], row["reward"]) == (4, 0.5), "of RL, of which a killed run has no other"
    assert read_run(run_id, uri).metrics == run.metrics, "by the name that the list has"
    with pytest.raises(DataError, match="20261129-033126-0000 is no run"):
        read_run("20261129-033126-0000", uri)


def test_two_runs_differ_in_one_setting_and_in_what_flipped(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["p/slow", "p/fast", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["settings"] == {"rl.actor.optim.lr": ["1e-05", "0.05"]}
    slow, fast = (validation(home, name) for name in ("slow", "fast"))
    pair = compared["pairs"]["p/fast"]
    for kind, mine, other in (("fixed", fast, slow), ("broken", slow, fast)):
        flipped = mine["correct"].astype(bool) & ~other["correct"].astype(bool)
        assert [flip["prompt"] for flip in pair[kind]] == list(slow["prompt"][flipped]), kind
        texts = [flip["completion_after"] for flip in pair[kind]]
        assert texts == list(fast["completion"][flipped])
    assert pair["problems"] == 16
    gain = paired_interval(slow["correct"].astype(float), fast["correct"].astype(float), 0.95)
    assert pair["gain"] == pytest.approx({"mean": gain.mean, "low": gain.low, "high": gain.high})
    assert pair["fixed"] or pair["broken"], "the test shows nothing where no answer has changed"
    rewards = compared["curves"]["reward/mean"]
    assert [list(curve) for curve in rewards] == [["1", "2"], ["1", "2"]]


def test_the_terminal_shows_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["p/slow", "p/fast", "p/slow", "--metric", "actor/*", "--samples", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "p/slow (2)" in out, "the same run twice has two columns"
    assert "rl.actor.optim.lr" in out
    assert "actor/entropy" in out
    assert "reward/mean" not in out
    assert " percentage points [" in out
    assert "0 fixed, 0 broken" in out, "of a run and itself"
    assert 1 <= out.count("  fixed: ") + out.count("  broken: ") <= 2


def test_a_page_is_written_unless_it_is_a_dry_run(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "runs.html"
    words = ["p/slow", "p/fast", "--html", str(page)]
    assert main([*words, "--dry-run"]) == 0
    assert "is not written" in capsys.readouterr().err
    assert not page.exists()
    assert main(words) == 0
    text = page.read_text()
    assert "rl.<wbr>actor.<wbr>optim.<wbr>lr" in text
    assert text.count("<svg") == text.count("<figure>") > 3
    assert main([*words[:-1], str(page / "below a file")]) == 1
    assert "choose another file" in capsys.readouterr().err


def test_the_commands_of_the_page_run(home: Path, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "watching.md").read_text()
    commands = re.findall(r"^python -m engine\.runs\b(.*)$", text, re.MULTILINE)
    assert len(commands) > 3
    names = ["p/slow", "p/fast"]
    for command in commands:
        words = shlex.split(command, comments=True)
        words[:2] = names if words else []
        assert main([w.replace("runs.html", str(tmp_path / "runs.html")) for w in words]) == 0
    assert (tmp_path / "runs.html").is_file()


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no browser: `apt-get install chromium`")
def test_a_phone_shows_the_page_without_scrolling_it_sideways(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "runs.html"
    assert main(["p/slow", "p/fast", "--html", str(path)]) == 0
    program = find_chromium()
    assert program is not None
    with browser(program) as page:
        for width in (390, 1280):
            page.call(
                "Emulation.setDeviceMetricsOverride",
                width=width, height=844, deviceScaleFactor=2, mobile=width < 500,
            )  # fmt: skip
            page.open(path)
            assert page.run("document.documentElement.scrollWidth") <= width
            assert page.requests == [path.as_uri()] * len(page.requests)
            assert page.complaints == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["p/slow", "p/none"], "p/none is no run: it has no summary.json"),
        (["p/slow", "p/fast", "--metric", "x*"], "no run has a metric x*; they have"),
        (["p/slow", "0" * 32], "0000000000000000"),
    ],
)
def test_a_fault_is_one_sentence(
    home: Path,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(words) == 1
    assert message in capsys.readouterr().err


def test_one_run_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["p/slow"])
    assert "name two runs or more" in capsys.readouterr().err


TRUTHS = [*map(str, range(7)), "6"]  # the last problem is there twice
PROMPTS = [f"what is {truth} + 0?" for truth in TRUTHS]


def evaluated(number: int, right: str, **changed: Any) -> Path:
    """Publish data, an RL model and its evaluation, with a 1 in `right` for each right answer."""

    def make(kind: str, parents: dict[str, Path], config: dict[str, Any], write: Any) -> Path:
        with staging(kind) as draft:
            write(draft)
            above = tuple(read_manifest(p).as_parent(name, p) for name, p in parents.items())
            measured = {"final/last_step": 2.0, "reward/mean": 0.1 * number} if kind == "rl" else {}
            return publish(draft, Draft(kind=kind, parents=above, config=config, metrics=measured))

    steps = pd.DataFrame(
        {"step": [1, 2], "reward/mean": [0.1, 0.1 * number], "model": [False, True]}
    )
    problems = pd.DataFrame(
        {"dataset": "test", "index": range(8), "data_source": "sums", "level": "",
         "prompt": PROMPTS, "ground_truth": TRUTHS}
    )  # fmt: skip
    answers = [
        Judged(
            f"{number}: {i}", 3, False, one == "1", float(one == "1"), str(i), str(i), True, False
        )
        for i, one in enumerate(right)
    ]
    rows = build_rows("rl", problems, answers, [[answer] for answer in answers])
    data = make("dataset", {}, {"data": {"source": "sums"}}, lambda d: (d / "x").write_text("x"))
    config = {"rl": {"lr": number}}
    policy = make(
        "rl", {"dataset": data}, config, lambda d: steps.to_parquet(d / "metrics.parquet")
    )
    settings = comparable_settings(DataConfig(), EvaluateConfig(samples=1, k=1), 0) | changed
    parents = {"dataset": data, "policy": policy}
    write = lambda d: rows.to_parquet(d / "rows_rl.parquet", index=False)  # noqa: E731
    return make("evaluation", parents, settings, write)


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////nowhere/mlflow.db")
    return evaluated(1, "11000000"), evaluated(2, "10111000")


def test_evaluations_are_paired_problem_by_problem(artifacts: tuple[Path, Path]) -> None:
    first, second = (read_run(str(evaluation)) for evaluation in artifacts)
    assert second.settings["rl.lr"] == "2"
    assert second.settings["data.source"] == "sums"
    assert second.metrics["reward/mean"] == {1: 0.1, 2: 0.2}
    comparison = compare([first, second])
    assert comparison.settings == {"rl.lr": ["1", "2"]}
    (pair,) = comparison.pairs.values()
    assert isinstance(pair, PairedGain)
    assert [flip["prompt"] for flip in pair.fixed] == PROMPTS[2:5]
    (broken,) = pair.broken
    assert broken == {
        "prompt": PROMPTS[1], "ground_truth": "1",
        "completion_before": "1: 1", "completion_after": "2: 1",
    }  # fmt: skip
    assert pair.gain == paired_interval(
        list(map(int, "11000000")), list(map(int, "10111000")), 0.95
    )
    assert "25.0% → 50.0%, +25.0 percentage points [" in pair.sentence()
    assert pair.sentence().endswith("on 8 problems of the evaluation; 3 fixed, 1 broken")


def test_a_model_is_read_with_its_newest_evaluation(artifacts: tuple[Path, Path]) -> None:
    (policy,) = (p.uri for p in read_manifest(artifacts[1]).parents if p.name == "policy")
    run, same = read_run(policy), read_run(str(artifacts[1]))
    assert (run.test, run.name, run.settings) == (same.test, same.name, same.settings)
    pd.testing.assert_frame_equal(run.answers, same.answers)


def test_a_workflow_is_read_by_its_summary(
    artifacts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, evaluation, gain in (("w1", artifacts[0], 0.1), ("w2", artifacts[1], 0.2)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (policy,) = (p.uri for p in read_manifest(evaluation).parents if p.name == "policy")
        made = {"evaluation": str(evaluation), "rl": str(local_path(policy))}
        summary = {"run_id": name, "gain": gain, "artifacts": made}
        summary["mlflow"] = {"run_id": name * 16}
        (tmp_path / "runs" / name / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (tmp_path / "runs" / "w3").mkdir()
    (tmp_path / "runs" / "w3" / "summary.json").write_text('{"skipped": "no new data"}')
    assert main(["w1", "w2"]) == 0
    assert "w2 over w1: 25.0% → 50.0%" in capsys.readouterr().out
    listed = {row["run"]: [row[k] for k in ("state", "gain", "steps")] for row in list_runs()}
    assert listed == {
        "w1": ["finished", 0.1, 2], "w2": ["finished", 0.2, 2], "w3": ["skipped", None, None]
    }  # fmt: skip
    assert [row["reward"] for row in list_runs() if row["run"] == "w2"] == [0.2]
    with pytest.raises(DataError, match=r"was skipped \(no new data\)"):
        read_run("w3")


def test_settings_are_read_as_a_person_would_write_them(artifacts: tuple[Path, Path]) -> None:
    audit = {"scorer": "exact_match", "passed": True, "holes": [], "warnings": []}
    foul = audit | {"passed": False, "holes": ["chain", "doubt"]}
    first, second = (
        read_run(str(evaluated(number, "1" * 8, reward_audit=[verdict])))
        for number, verdict in ((4, audit), (5, foul))
    )
    assert first.settings["trained_by"] == "rl"
    key = "reward_audit.exact_match"
    assert compare([first, second]).settings[key] == ["passed", "holes: chain, doubt"]
    digest, columns = "0123456789ab" + "c" * 52, {"data.columns.prompt": "input"}
    other = replace(first, settings=columns | {"start": digest, "data.rows": "3"})
    none = replace(first, settings={"data.columns": "{}", "start": "", "data.digest": "0"})
    assert compare([none, other]).settings == {
        "data.columns.prompt": ["{}", "input"], "start": ["", digest[:12]]
    }  # fmt: skip


def test_a_page_without_a_gain_raises_no_alarm(artifacts: tuple[Path, Path]) -> None:
    first = read_run(str(artifacts[0]))
    page = compare([first, RecordedRun("none", "here", {}, {})]).as_page()
    body = page.partition("</style>")[2]
    assert '<p class="verdict"><b>none can' in body
    assert "declined" not in body
    assert "paired gain" not in body


def test_what_two_evaluations_do_not_share_is_said(artifacts: tuple[Path, Path]) -> None:
    first = read_run(str(artifacts[0]))
    other = read_run(str(evaluated(3, "11111111", seed=7)))
    fewer = replace(read_run(str(artifacts[1])), answers=first.answers[:4])
    validated = replace(other, test="validation at step 3")
    unasked = RecordedRun("none", "here", {}, {})
    foreign = replace(other, answers=other.answers.rename(index=lambda key: f"{key}!"))
    seeds, few, mixed, none, apart = compare(
        [first, other, fewer, validated, unasked, foreign]
    ).pairs.values()
    assert isinstance(seeds, PairedGain)
    assert seeds.note == "seed"
    assert isinstance(few, PairedGain)
    assert (few.problems, few.note) == (4, "8 and 4 problems")
    assert mixed == (
        f"{first.name} has the {first.test}, {other.name} the validation at step 3; evaluate both "
        "alike"
    )
    assert none == "none has neither an evaluation nor a sample of a validation"
    assert str(apart).endswith("which have no problem in common")
