"""Reports and decks of tasks."""

from __future__ import annotations

import html
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from flytekit import FlyteContextManager
from flytekit.core.context_manager import ExecutionState
from flytekit.deck import DeckField
from flytekit.models.core.identifier import WorkflowExecutionIdentifier
from flytekit.types.directory import FlyteDirectory
from promotion_bench import Bench, digest, new_run

from engine.console import display_path
from engine.data.rows import user_message
from engine.evaluation.report_page import Verdict
from engine.stages.evaluation import known_from_training, print_summary, verdict_of
from engine.stages.promotion import read_decision
from engine.stages.stage import Host, hosted, show_facts
from engine.storage.artifacts import verify
from tasks import host
from tasks.host import DECKS, LiveDeck
from tasks.stages import evaluate_stage, finalize, plan, trigger_retraining

PAGE = "https://mlflow.example.com/#/experiments/1/runs/ab"


def facts(tracking_uri: str, url: str) -> dict[str, Any]:
    """A summary, as `summarise` makes it."""
    return {
        "run_id": "20261121-024512-3f9a",
        "pass_at_1": {"warm_start": 0.4, "rl": 0.9},
        "pass_at_1_interval": {"warm_start": [0.3, 0.5], "rl": [0.8, 1.0]},
        "policy_step": "step 40 of 80, validation reward 0.812",
        "gain": 0.5,
        "gain_interval": [0.4, 0.6],
        "problems": 32,
        "seconds": {"dataset": 1.0, "total": 2.0},
        "unchanged": [],
        "report": "outputs/runs/20261121-024512-3f9a/report.html",
        "start_model": "",
        "warm_start": True,
        "trained_by": "rl",
        "promotion": {
            "promoted": True,
            "waits_for_approval": False,
            "reason": "better",
            "model_name": "policy",
            "model_version": "1",
            "alias": "champion",
            "previous_champion": None,
        },
        "reward_audit": [],
        "mlflow": {
            "tracking_uri": tracking_uri,
            "experiment": "hybridflyte",
            "run_id": "ab",
            "url": url,
        },
    }


@pytest.fixture
def folders(bench: Bench, tmp_path: Path) -> dict[str, Path]:
    return {"rl": tmp_path, "evaluation": bench.evaluation(bench.model(seed=1), 20)}


@pytest.mark.parametrize(
    ("tracking_uri", "url", "said", "unsaid"),
    [
        ("https://mlflow.example.com", PAGE, PAGE, "mlflow ui"),
        ("sqlite:////w/mlflow.db", "", "mlflow ui --backend-store-uri sqlite:////w/mlflow.db", "#"),
    ],
)
def test_mlflow_is_a_page_where_it_is_a_server_and_a_command_where_it_is_a_file(
    tracking_uri: str,
    url: str,
    said: str,
    unsaid: str,
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_summary(facts(tracking_uri, url), tmp_path / "summary.json", folders)
    line = next(line for line in capsys.readouterr().out.splitlines() if "MLflow UI" in line)
    assert said in line
    assert unsaid not in line


@pytest.mark.parametrize(
    ("promoted", "waits", "champion", "title"),
    [
        (True, False, "2", "policy version 3 is now champion"),
        (False, False, "3", "policy version 3 stays champion"),
        (False, False, None, "policy version 3 was not promoted"),
        (False, True, "2", "policy version 3 waits for approval"),
    ],
)
def test_a_verdict_is_read_from_the_decision(
    promoted: bool, waits: bool, champion: str | None, title: str, tmp_path: Path
) -> None:
    decision = {
        "promoted": promoted, "waits_for_approval": waits, "reason": "because",
        "model_name": "policy", "model_version": "3", "alias": "champion",
        "previous_champion": champion,
    }  # fmt: skip
    (tmp_path / "decision.json").write_text(json.dumps(decision))
    assert verdict_of(read_decision(tmp_path)) == Verdict(
        promoted or champion == "3", title, "because"
    )


def test_the_report_of_a_run_names_the_verdict_the_model_and_its_lineage_page(
    bench: Bench,
) -> None:
    model = bench.model(seed=1)
    evaluation = bench.evaluation(model, 20)
    run = new_run()
    decision = bench.promote_in(run, model, evaluation)
    before = verify(bench.folder), verify(evaluation)
    finalize(run=run, artifact=FlyteDirectory(str(bench.folder)))
    assert (verify(bench.folder), verify(evaluation)) == before, "an artifact was changed"
    folder = Path("hybridflyte") / "runs" / run.run_id
    page = html.unescape((folder / "report.html").read_text())
    assert "hybridflyte-policy version 1 is now champion" in page
    assert decision["reason"] in page
    assert digest(model) in page
    assert '<a href="lineage.html">' in page
    lineage = (folder / "lineage.html").read_text()
    for artifact in (model, evaluation, bench.folder):
        assert digest(artifact) in lineage


REASON = (
    "Not promoted: pass@1 gain +0.21 percentage points [-0.40, +0.80] over the champion; its lower "
    "end must be above the required gain of +0.00 percentage points."
)


@pytest.mark.parametrize("width", [80, 200])
def test_the_sentence_on_promotion_is_whole_and_all_gains_are_in_points(
    width: int,
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    told = facts("sqlite:////w/mlflow.db", "")
    told["promotion"] |= {"promoted": False, "reason": REASON}
    print_summary(told, tmp_path / "summary.json", folders)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert f"promotion: {REASON}" in lines
    assert "MLflow UI: mlflow ui --backend-store-uri sqlite:////w/mlflow.db" in lines
    assert f"model: {display_path(folders['rl'])}" in lines, "whole, to be copied"
    assert max(len(line) for line in lines if "│" in line) <= width
    assert "+50.0 percentage points [+40.0, +60.0]" in out
    assert "version 1 was not promoted (why: below)" in out


@pytest.mark.parametrize(
    ("rates", "start", "said", "unsaid"),
    [
        ((0.0, 0.01), "", "a model this small, from scratch", "percent"),
        ((0.0, 0.01), "/models/big", "the start model /models/big solves almost none", "scratch"),
        ((0.0, 0.01), None, "the model that RL started from solves almost none", "scratch"),
        ((0.5, 0.01), "", "promotion: better", "near 0"),
    ],
)
def test_models_near_0_are_called_what_they_are(
    rates: tuple[float, float],
    start: str | None,
    said: str,
    unsaid: str,
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = facts("sqlite:////w/mlflow.db", "") | {"start_model": start}
    told["pass_at_1"] = dict(zip(("warm_start", "rl"), rates, strict=True))
    print_summary(told, tmp_path / "summary.json", folders)
    last = capsys.readouterr().out.splitlines()[-1]
    assert said in last
    assert unsaid not in last


def shown(facts: dict[str, object]) -> str:
    """The page of a tab with these facts."""
    pages: list[str] = []

    class Pages(Host):
        def show(self, tab: str, page: str) -> None:
            pages.append(page)

    with hosted(Pages()):
        show_facts("Facts", facts)
    return pages[0]


def test_a_table_shows_texts_as_they_are() -> None:
    page = shown({"reward": 0.123456, "steps": 12, "why": "<b>5 & more</b>"})
    assert page.count("<tr>") == 3
    assert "<td>0.1235</td>" in page
    assert "<td>&lt;b&gt;5 &amp; more&lt;/b&gt;</td>" in page


def test_a_table_has_no_credentials() -> None:
    page = shown({"model": "s3://writer:hunter2hunter2@bucket/model"})
    assert "hunter2" not in page
    assert "bucket/model" in page


def test_no_deck_shows_settings_as_they_were_given() -> None:
    """They hold what credentials a person put into them."""
    for task in (plan, trigger_retraining):
        assert task.deck_fields == list(DECKS["settings"]["deck_fields"]) == [DeckField.TIMELINE]
    assert evaluate_stage.deck_fields == list(DECKS["pages"]["deck_fields"])
    assert DeckField.INPUT not in evaluate_stage.deck_fields


@pytest.fixture
def outputs(tmp_path: Path) -> Iterator[Path]:
    """The output folder of a task that runs on a cluster, in a context of its own."""
    context = FlyteContextManager.current_context()
    pod = context.user_space_params.builder()
    pod.execution_id = WorkflowExecutionIdentifier("hybridflyte", "production", "f1a2b3")
    pod.output_metadata_prefix = str(tmp_path)
    pod.enable_deck = True
    pod.decks = []
    mode = ExecutionState.Mode.TASK_EXECUTION
    state = context.new_execution_state().with_params(mode=mode, user_space_params=pod.build())
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        yield tmp_path


def show(deck: LiveDeck, page: str) -> None:
    """From a thread, as the engine's writer does."""
    thread = threading.Thread(target=deck.show, args=(page,))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_the_page_can_be_read_while_the_task_runs(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = Path(FlyteContextManager.current_context().file_access.local_sandbox_dir)
    before = sorted(sandbox.rglob("*"))
    deck = LiveDeck("Rollouts")
    show(deck, "<p>step 1</p>")
    file = outputs / "deck.html"
    assert "<p>step 1</p>" in file.read_text()
    show(deck, "<p>step 2</p>")
    assert "step 2" not in file.read_text(), "not yet: once a minute is enough"
    monkeypatch.setattr(host, "PUBLISH_SECONDS", 0.0)
    deck._due = 0.0
    show(deck, "<p>step 3</p>")
    assert "<p>step 3</p>" in file.read_text()
    assert file.read_text().count(">Rollouts<") == 1
    assert sorted(sandbox.rglob("*")) == before, "no copies are left"


def test_at_home_the_deck_is_written_once_at_the_end(tmp_path: Path) -> None:
    decks = FlyteContextManager.current_context().user_space_params.decks
    try:
        deck = LiveDeck("Rollouts")
        show(deck, "<p>step 1</p>")
        assert decks[-1] is deck
        assert deck.html == "<p>step 1</p>"
        assert deck._due == 0.0, "nothing was published"
    finally:
        decks.remove(deck)


def test_each_set_says_how_many_of_its_prompts_were_trained_on(tmp_path: Path) -> None:
    def prompts(*texts: str) -> pd.DataFrame:
        return pd.DataFrame({"prompt": [user_message(text) for text in texts]})

    prompts("What is 1 + 1?", "And 2 + 2?").to_parquet(tmp_path / "train.parquet")
    problems = {
        "test": prompts("What is 3 + 3?", "what is 1 + 1"),
        "hard": prompts("And 2 + 2?", "What is 5 + 5?", "What is 1 + 1?"),
    }
    assert known_from_training(tmp_path, problems) == {"test": 1, "hard": 2}
