"""Scheduled retraining: a calendar of days, each a real run of the workflow.

The first champion answers 3 more often than 7; the test set and all that arrives want 7. A tiny
model learns that in a few steps, so that one run wins and those after it don't.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from flyte_runs import PYFLYTE, REPOSITORY, Outcome, Place, merge, settings

from engine.data.rows import rl_row
from engine.promotion.champions import Champions
from engine.storage.artifacts import read_manifest
from engine.storage.digests import hash_file
from engine.tracking import Tracker

pytestmark = pytest.mark.usefixtures("without_drawings")

WORKFLOW = str(REPOSITORY / "workflows" / "retraining.py")
FIRST_DAY = datetime(2026, 11, 2, 2, tzinfo=UTC)
MINIMUM = 8
NEVER = {"promote": {"minimum_gain": 0.999}}


@dataclass
class Calendar:
    """A model with a champion, a prefix that problems arrive in, and what should be ingested.

    `champion_has` is the ledger that the champion's lineage should hold: file → problems.
    """

    place: Place
    prefix: Path
    model: str
    start: str  # content of the first champion's test set
    written: dict[str, tuple[datetime, int]] = field(default_factory=dict)
    champion_has: set[str] = field(default_factory=set)
    problems: int = 0

    def arrive(self, day: int, count: int, *, hours_late: float = 0, name: str = "a") -> None:
        """Write `count` new problems into a day's folder, at that day's noon or later."""
        noon = FIRST_DAY.replace(hour=12) + timedelta(days=day)
        written = noon + timedelta(hours=hours_late)
        path = f"{noon.date()}/{name}.jsonl"
        file = self.prefix / path
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = []
        for _ in range(count):
            self.problems += 1
            question = f"What is new {self.problems} plus 7?"
            rows.append(rl_row("arithmetic", question, "7", {"index": self.problems}))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(file, (written.timestamp(),) * 2)
        self.written[path] = (written, count)

    def new_at(self, kickoff: datetime) -> dict[str, int]:
        """The files that a kick-off should ingest."""
        return {
            path: count
            for path, (written, count) in self.written.items()
            if written <= kickoff and path not in self.champion_has
        }

    def arguments(self, number: int, change: dict[str, Any]) -> list[str]:
        base = {
            "data": {"max_response_length": 8},
            "rl": {
                "rollout": {"n": 8},
                "actor": {"optim": {"lr": 3e-3}, "use_kl_loss": False},
                "trainer": {"total_training_steps": 6},
            },
            "promote": {"model_name": self.model},
            "retrain": {"path": str(self.prefix), "minimum_rows": MINIMUM},
        }
        merge(base, change)
        kickoff = FIRST_DAY + timedelta(days=number)
        at = f"{kickoff:%Y-%m-%dT%H:%M:%S}"
        return ["run", WORKFLOW, "retraining", "--kickoff", at, "--config", settings(base)]

    def run(self, number: int, change: dict[str, Any] | None = None) -> Outcome:
        """Run the retraining of day `number` and check it against this calendar."""
        new = self.new_at(FIRST_DAY + timedelta(days=number))
        before = self.champion
        outcome = self.place.invoke(*self.arguments(number, change or {}))
        assert outcome.code == 0, outcome.text
        if sum(new.values()) < MINIMUM:
            assert outcome.stages == []
            reason = outcome.summary["skipped"]
            too_little = f"{sum(new.values())} new problems since version {before} became champion"
            assert reason.startswith(too_little if new else "nothing new in")
            assert self.champion == before
            return outcome
        assert ledger(outcome) == self.champion_has | set(new)
        assert hash_file(dataset(outcome) / "test.parquet") == self.start
        summary = outcome.summary["promotion"]
        assert summary["previous_champion"] == before
        if summary["promoted"]:
            self.champion_has |= set(new)
            assert self.champion == summary["model_version"] != before
        else:
            assert self.champion == before
        return outcome

    def roll_back(self) -> None:
        """Take the champion back to the first."""
        Champions(Tracker(self.place.tracking_uri), self.model).rollback("wrong in use", to="1")
        self.champion_has.clear()

    @property
    def champion(self) -> str:
        found = Tracker(self.place.tracking_uri).champion(self.model)
        assert found is not None
        return found.version


def dataset(outcome: Outcome) -> Path:
    return Path(outcome.summary["artifacts"]["dataset"])


def ledger(outcome: Outcome) -> set[str]:
    entries = json.loads((dataset(outcome) / "arrivals.json").read_text())["files"]
    paths = [entry["path"] for entry in entries]
    assert len(paths) == len(set(paths))
    return set(paths)


def training_rows(outcome: Outcome) -> list[int]:
    """Indices of the newly arrived problems that a run trained on."""
    rows = pd.read_parquet(dataset(outcome) / "train.parquet")
    asked = [prompt[0]["content"] for prompt in rows["prompt"]]
    found = [re.search(r"What is new (\d+)", text) for text in asked]
    return [int(match[1]) for match in found if match]


@pytest.fixture(scope="module")
def trained(
    new_place: Callable[[], Place], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Place, Path]:
    """A place where the main job has made a model that says 3 where it should say 7."""
    place, source = new_place(), tmp_path_factory.mktemp("source")
    for name, count, wanted in (("train", 400, "37373"), ("test", 32, "7")):
        rows = [
            {"question": f"What is {name} {n} plus 7?", "answer": f"#### {wanted[n % len(wanted)]}"}
            for n in range(count)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (source / f"{name}.jsonl").write_text(text)
    change = {
        "data": {"max_response_length": 8},
        "sft": {"max_steps": 120},
        "rl": {"trainer": {"total_training_steps": 1}},
    }
    command = ("--source", "gsm8k", "--path", str(source), "--config", settings(change))
    first = place.run(*command)
    assert first.code == 0, first.text
    assert first.summary["pass_at_1"]["rl"] < 0.5
    return place, Path(first.summary["artifacts"]["rl"])


@pytest.fixture
def calendar(
    trained: tuple[Place, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Calendar:
    """That model as the champion under a name of the test's own, and nothing arrived."""
    place, model = trained
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    tracker = Tracker(place.tracking_uri)
    version = tracker.register_model(model, name, tracker.start_pipeline(name))
    Champions(tracker, name).promote(version, None, "the first", request=name)
    (tmp_path / "arrivals").mkdir()
    calendar = Calendar(place, tmp_path / "arrivals", name, "")
    calendar.start = hash_file(Path(_former(calendar)) / "test.parquet")
    return calendar


def test_the_first_nights(calendar: Calendar) -> None:
    first_nights(calendar)


def first_nights(calendar: Calendar) -> None:
    """Four kick-offs: none arrived, too few, a promotion, a new model that is declined."""
    calendar.run(0)  # nothing has arrived
    calendar.arrive(0, 5)
    calendar.run(1)  # too little
    calendar.arrive(1, 20)
    third = calendar.run(2)
    assert sorted(training_rows(third)) == list(range(1, 26))
    assert third.summary["promotion"]["promoted"], third.text
    calendar.run(2)  # the same day again: nothing is left to do
    calendar.arrive(2, 16)
    fourth = calendar.run(3, NEVER)
    assert not fourth.summary["promotion"]["promoted"]
    again = calendar.run(3, NEVER)  # again, declined again: the same data, the same model
    assert again.summary["digests"] == fourth.summary["digests"]
    assert again.stages == ["promotion"]


@pytest.mark.slow
def test_two_weeks(calendar: Calendar) -> None:
    first_nights(calendar)
    calendar.run(4)  # what a declined run saw is still new
    calendar.arrive(4, 9)  # day 5 is missed
    calendar.arrive(5, 9)
    calendar.run(6)
    calendar.roll_back()  # to a champion that has seen nothing of all this
    calendar.arrive(3, 12, hours_late=80, name="late")  # into the folder of a past day
    eighth = calendar.run(7)
    assert eighth.summary["promotion"]["promoted"], eighth.text
    assert len(training_rows(eighth)) == 71  # all that has arrived, the late ones too
    calendar.run(8)
    calendar.arrive(8, 3)
    calendar.run(9)
    calendar.arrive(9, 3)
    calendar.run(10)
    calendar.arrive(10, 3)
    calendar.run(11, NEVER)
    calendar.run(5)  # the missed one after all: nothing that was not ingested
    calendar.run(12, NEVER)  # the same as the day before: nothing arrived
    calendar.run(13, NEVER)
    history = Champions(Tracker(calendar.place.tracking_uri), calendar.model).history()
    assert [move.version for move in history[:3]] == ["1", "2", "1"]
    assert [move.replaced for move in history[1:]] == [move.version for move in history[:-1]]
    assert history[-1].version == calendar.champion


@pytest.mark.slow
def test_two_kick_offs_at_once(calendar: Calendar) -> None:
    calendar.arrive(0, 16)
    command = [sys.executable, "-c", PYFLYTE, *calendar.arguments(1, {})]
    running = [
        subprocess.Popen(
            command,
            env=calendar.place.environment(),
            cwd=calendar.place.root / "work",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    texts = [process.communicate(timeout=500)[0] for process in running]
    # One at a time trains in a checkpoint folder; the second is refused, or finds the result.
    assert 0 in [process.returncode for process in running], "\n".join(texts)
    for process, text in zip(running, texts, strict=True):
        assert process.returncode == 0 or "is in use by" in text, text
    champions = Champions(Tracker(calendar.place.tracking_uri), calendar.model)
    moves = champions.history()[1:]
    assert [move.replaced for move in moves] == ["1"] * len(moves)
    assert len(moves) == 1, "\n".join(texts)
    calendar.champion_has |= set(calendar.written)
    calendar.run(2)  # nothing is left


def test_replay_is_its_share_and_no_held_out_problem_is_trained_on(calendar: Calendar) -> None:
    calendar.arrive(0, 12)
    test = pd.read_parquet(Path(_former(calendar)) / "test.parquet")
    leaked = calendar.prefix / "2026-11-01" / "leaked.jsonl"
    leaked.parent.mkdir()
    row = rl_row("arithmetic", test["prompt"].iloc[0][0]["content"], "7", {"index": 0})
    leaked.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    os.utime(leaked, (FIRST_DAY.timestamp(),) * 2)
    calendar.written["2026-11-01/leaked.jsonl"] = (FIRST_DAY, 1)
    briefly = {"trainer": {"total_training_steps": 1}}  # what it learns is not looked at
    outcome = calendar.run(1, {"retrain": {"replay": 0.5}, "rl": briefly})
    rows = pd.read_parquet(dataset(outcome) / "train.parquet")
    assert len(rows) == 24
    assert len(training_rows(outcome)) == 12
    assert "12 new problems (2 repeated or held out left out), 12 replayed" in outcome.out


def test_held_out_problems_alone_are_skipped(calendar: Calendar) -> None:
    test = pd.read_parquet(Path(_former(calendar)) / "test.parquet")
    asked = [prompt[0]["content"] for prompt in test["prompt"]]
    leaked = calendar.prefix / "2026-11-01" / "leaked.jsonl"
    leaked.parent.mkdir()
    rows = [rl_row("arithmetic", question, "7", {"index": 0}) for question in asked]
    leaked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(leaked, (FIRST_DAY.timestamp(),) * 2)
    outcome = calendar.place.invoke(*calendar.arguments(1, {}))
    assert outcome.code == 0, outcome.text
    assert outcome.stages == []
    reason = outcome.summary["skipped"]
    assert reason.startswith("0 new problems since version 1 became champion (32 more are repeated")


def test_a_kick_off_that_is_still_to_come_starts_nothing(calendar: Calendar) -> None:
    calendar.arrive(0, 16)
    outcome = calendar.place.invoke(*calendar.arguments(9999, {}))
    assert outcome.code == 1
    assert "is still to come: it is now" in outcome.error
    assert outcome.stages == []


def _former(calendar: Calendar) -> str:
    tracker = Tracker(calendar.place.tracking_uri)
    found = tracker.champion(calendar.model)
    assert found is not None
    return read_manifest(found.tags["artifact_uri"]).parents[0].uri


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"retrain": {"path": ""}}, "retrain.path is empty"),
        ({"retrain": {"path": "/nowhere"}}, "retrain.path='/nowhere' does not exist"),
        ({"promote": {"model_name": "nobody"}}, "has no champion of 'nobody' to start from"),
    ],
)
def test_what_can_t_start_says_why(calendar: Calendar, change: dict[str, Any], said: str) -> None:
    outcome = calendar.place.invoke(*calendar.arguments(1, change))
    assert outcome.code == 1
    assert said in outcome.error
    assert outcome.stages == []


def test_mlflow_down_starts_nothing(calendar: Calendar) -> None:
    calendar.arrive(0, 16)
    outcome = calendar.place.invoke(
        *calendar.arguments(1, {}), MLFLOW_TRACKING_URI="http://127.0.0.1:9"
    )
    assert outcome.code == 1
    assert "MLflow" in outcome.error
    assert outcome.stages == []


def test_a_champion_whose_dataset_was_changed_starts_nothing(calendar: Calendar) -> None:
    calendar.arrive(0, 16)
    test = Path(_former(calendar)) / "test.parquet"
    content = test.read_bytes()
    test.write_bytes(content[:-1] + b"x")
    try:
        outcome = calendar.place.invoke(*calendar.arguments(1, {}))
    finally:
        test.write_bytes(content)
    assert outcome.code == 1
    assert "test.parquet" in outcome.error
    assert outcome.stages == []
