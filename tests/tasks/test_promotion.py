"""The promote task against a real registry: who becomes champion, and when nobody does.

The rules one by one are in tests/engine/promotion; here they meet artifacts, MLflow and retries.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from flytekit.types.directory import FlyteDirectory
from promotion_bench import NAME, Bench, champion, digest, spoil

from engine.config import GuardConfig, PromoteConfig
from engine.errors import TrackingError
from engine.promotion import gate
from engine.promotion.champions import Champions
from engine.stages import promotion
from engine.stages.settings import RunContext
from engine.storage.artifacts import Draft, publish, read_manifest, staging
from engine.tracking import Tracker
from tasks.host import StageError
from tasks.stages import waits_for_approval


def test_a_first_model_without_a_gain_or_below_the_required_score_is_no_champion(
    bench: Bench,
) -> None:
    model = bench.model(seed=1)
    useless, good = bench.evaluation(model, 0), bench.evaluation(model, 20)
    assert not bench.promote(model, useless)["promoted"]
    decision = bench.promote(model, good, PromoteConfig(minimum_score=0.4))
    assert "pass@1 is 50.00% [35.20%, 64.80%]; its lower end must be" in decision["reason"]
    assert champion() is None
    assert bench.promote(model, useless, PromoteConfig(bootstrap=True))["promoted"]
    assert champion() == digest(model)


def test_a_worse_model_is_not_promoted_and_told_why(bench: Bench, current_champion: Path) -> None:
    model = bench.model(seed=2)
    decision = bench.promote(model, bench.evaluation(model, 10))
    assert decision["promoted"] is False
    assert decision["gain"][0] == pytest.approx(-0.25)
    assert "lower end must be above" in decision["reason"]
    assert champion() == digest(current_champion)


def test_an_equal_model_is_not_promoted(bench: Bench, current_champion: Path) -> None:
    model = bench.model(seed=2)
    assert bench.promote(model, bench.evaluation(model, 20))["promoted"] is False
    assert champion() == digest(current_champion)


def test_a_better_model_takes_the_alias(bench: Bench, current_champion: Path) -> None:
    model = bench.model(seed=2)
    decision = bench.promote(model, bench.evaluation(model, 36))
    assert decision["promoted"] is True
    assert decision["gain"][0] == pytest.approx(0.4)
    assert decision["previous_champion"] != decision["model_version"]
    assert champion() == digest(model)


def test_promoting_twice_changes_nothing(bench: Bench, current_champion: Path) -> None:
    again = bench.promote(current_champion, bench.evaluation(current_champion, 20))
    assert again["promoted"] is False
    assert "is the champion already" in again["reason"]
    assert again["model_version"] == again["previous_champion"]
    assert champion() == digest(current_champion)


def lose_a_file(evidence: Path) -> None:
    (evidence / "comparison.json").unlink()


def lose_the_manifest(evidence: Path) -> None:
    (evidence / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [spoil, lose_a_file, lose_the_manifest])
def test_tampered_evidence_promotes_nobody(
    bench: Bench, current_champion: Path, damage: Callable[[Path], None]
) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    damage(evidence)
    with pytest.raises(StageError):
        bench.promote(model, evidence)
    assert champion() == digest(current_champion)
    assert list((Path.cwd() / "hybridflyte" / ".staging").glob("*")) == []


def test_an_unreachable_registry_promotes_nobody(
    bench: Bench, current_champion: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    run = RunContext(run_id="r", mlflow_run="x", experiment="hybridflyte", started_at=0.0)
    uri = f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        started = time.monotonic()
        with pytest.raises(StageError, match="MLFLOW_TRACKING_URI"):
            bench.promote_in(run, model, evidence)
        assert time.monotonic() - started < 30
    found = Tracker(uri=uri).champion(NAME, "champion")
    assert found is not None
    assert found.tags["artifact_digest"] == digest(current_champion)


def test_the_artifact_holds_the_decision_its_evidence_and_its_parents(
    bench: Bench, current_champion: Path
) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    decision = bench.promote(model, evidence)
    manifest = read_manifest(bench.folder)
    parents = {parent.name: parent.digest for parent in manifest.parents}
    assert parents.pop("champion_evaluation")
    assert parents == {
        "dataset": digest(bench.dataset),
        "policy": digest(model),
        "evaluation": digest(evidence),
        "champion": digest(current_champion),
    }
    assert manifest.config["promote"] == PromoteConfig().model_dump(mode="json")
    measured = json.loads((bench.folder / "evidence.json").read_text())
    assert [measured["gain"][end] for end in ("mean", "low", "high")] == decision["gain"]
    assert [(o["rule"], o["passed"]) for o in decision["outcomes"]] == [
        ("gain", True), ("contamination", True),
    ]  # fmt: skip


def test_a_retry_after_the_alias_moved_says_the_same(bench: Bench, current_champion: Path) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    run = RunContext(
        run_id="one", mlflow_run=Tracker().start_pipeline("p"), experiment="hybridflyte",
        started_at=0.0,
    )  # fmt: skip
    first = bench.promote_in(run, model, evidence)
    assert bench.promote_in(run, model, evidence) == first
    moves = Champions(Tracker(), NAME).history()
    assert [(m.version, m.replaced) for m in moves] == [("1", None), ("2", "1")]
    assert moves[-1].reason == first["reason"]


def test_against_a_champion_that_came_during_the_evaluation_it_is_decided_again(
    bench: Bench,
    current_champion: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rival, model = bench.model(seed=3), bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    rivals = bench.promote(rival, bench.evaluation(rival, 0))["model_version"]
    compare = promotion.compare_and_decide
    champions = Champions(Tracker(), NAME)
    others = [(rivals, "1"), ("1", rivals)]  # who promote in between, and whom they replace

    def slow(*arguments: Any) -> Any:
        """Decide; meanwhile somebody else promotes."""
        decided = compare(*arguments)
        for version, former in others[:1]:
            champions.promote(version, former, "a rival", request=version, by="ada")
        del others[:1]
        return decided

    monkeypatch.setattr(promotion, "compare_and_decide", slow)
    with monkeypatch.context() as once:
        once.setattr(gate, "DECISIONS", 1)
        with pytest.raises(StageError, match=r"on version 2 now, .* by ada: a rival"):
            bench.promote(model, evidence)
    assert champion() == digest(rival)
    decision = bench.promote(model, evidence)
    assert (decision["promoted"], decision["previous_champion"]) == (True, "1")
    assert "on version 1 now" in capsys.readouterr().out
    parents = [parent.name for parent in read_manifest(bench.folder).parents]
    assert parents.count("champion_evaluation") == parents.count("champion") == 1
    assert [move.version for move in champions.history()] == ["1", "2", "1", "3"]


def test_longer_answers_and_a_regression_are_not_promoted(
    bench: Bench, current_champion: Path
) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36, length=9.0)
    rules = PromoteConfig(
        max_length_ratio=2.0, max_kl=0.1, guards=(GuardConfig(data_source="nowhere"),)
    )
    decision = bench.promote(model, evidence, rules)
    assert decision["promoted"] is False
    assert [o["rule"] for o in decision["outcomes"] if not o["passed"]] == [
        "guard pass_at_1 of nowhere", "kl", "length",
    ]  # fmt: skip
    assert "2.25 [2.25, 2.25] times as long" in decision["reason"]
    assert decision["reason"].count("was not measured") == 2
    assert champion() == digest(current_champion)


def test_training_on_the_test_is_found_in_all_that_the_model_descends_from(
    bench: Bench, current_champion: Path
) -> None:
    with staging("dataset") as folder:
        pd.read_parquet(bench.dataset / "test.parquet").to_parquet(folder / "train.parquet")
        leak = publish(folder, Draft(kind="dataset"))
    other = bench.model(seed=2)
    with staging("rl") as folder:
        shutil.copytree(other, folder, dirs_exist_ok=True)
        (folder / "manifest.json").unlink()
        parent = read_manifest(leak).as_parent("dataset", leak)
        model = publish(folder, Draft(kind="rl", parents=(parent,)))
    decision = bench.promote(model, bench.evaluation(model, 36))
    assert decision["promoted"] is False
    assert "100.00% of the test prompts were trained on" in decision["reason"]


def test_an_approval_is_waited_for_and_then_taken(bench: Bench, current_champion: Path) -> None:
    rules = PromoteConfig(approval="required")
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    assert bench.promote(model, evidence, rules)["reason"].endswith("a person's approval.")
    assert waits_for_approval(promotion=FlyteDirectory(str(bench.folder))) is True
    assert champion() == digest(current_champion)
    decision = bench.promote(model, evidence, rules, approved_by="ada")
    assert "approved by ada" in decision["reason"]
    assert waits_for_approval(promotion=FlyteDirectory(str(bench.folder))) is False
    assert champion() == digest(model)
    assert Champions(Tracker(), NAME).history()[-1].by == "ada"
    worse = bench.model(seed=3)
    declined = bench.promote(worse, bench.evaluation(worse, 0), rules)["model_version"]
    assert waits_for_approval(promotion=FlyteDirectory(str(bench.folder))) is False
    with pytest.raises(TrackingError, match=r"never was champion"):
        Champions(Tracker(), NAME).rollback("why", to=declined)
    with pytest.raises(TrackingError, match=r"nobody approved of version 3; nothing was moved"):
        Champions(Tracker(), NAME).rollback("why", to=declined, force=True)
    assert champion() == digest(model)


def test_an_evaluation_of_another_model_promotes_nobody(
    bench: Bench, current_champion: Path
) -> None:
    model, other = bench.model(seed=2), bench.model(seed=3)
    with pytest.raises(StageError, match=r"the evaluation .* is of policy"):
        bench.promote(model, bench.evaluation(other, 36))
    assert champion() == digest(current_champion)


def test_a_rewritten_ancestor_promotes_nobody(bench: Bench, current_champion: Path) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    words = json.loads((model / "manifest.json").read_text())
    words["metrics"] = {"reward": 1.0}
    (model / "manifest.json").write_text(json.dumps(words))
    with pytest.raises(StageError, match=r"not as recorded: .*manifest.json .*nothing was moved"):
        bench.promote(model, evidence)
    assert champion() == digest(current_champion)


def test_the_evaluation_set_that_is_named_decides_or_all_of_them(bench: Bench) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 20, hard_from=20)  # all of test right, none of hard
    all_sets = bench.promote(model, evidence, PromoteConfig(dataset="all"))
    assert not all_sets["promoted"]
    assert "hard: pass@1 gain +0.00 percentage points" in all_sets["reason"]
    assert all_sets["gain"] == [0.0, 0.0, 0.0]
    rules = [(o["rule"], o["passed"]) for o in all_sets["outcomes"]]
    assert rules == [
        ("gain on test", True), ("contamination on test", True),
        ("gain on hard", False), ("contamination on hard", True),
    ]  # fmt: skip
    measured = json.loads((bench.folder / "evidence.json").read_text())
    assert measured["sets"]["test"]["gain"]["mean"] == 1.0
    with pytest.raises(StageError, match="the evaluation has no set 'easy', but test, hard"):
        bench.promote(model, evidence, PromoteConfig(dataset="easy"))
    assert champion() is None
    guarded = PromoteConfig(guards=(GuardConfig(dataset="hard", metric="pass_at_1"),))
    assert bench.promote(model, evidence, guarded)["promoted"]
