"""The promotion stage: settings, copies, the gate."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from flytekit.types.directory import FlyteDirectory
from promotion_bench import (
    EVALUATE,
    NAME,
    RULES,
    Bench,
    champion,
    digest,
    make_bench,
    new_run,
    rules,
    spoil,
)

import engine.storage.digests
from engine.config import GuardConfig
from engine.errors import TrackingError
from engine.evaluation.comparability import comparable_settings, incomparable
from engine.promotion import gate
from engine.promotion.champions import Champions
from engine.stages import promotion
from engine.stages.settings import EvaluationSettings, RunContext
from engine.storage.artifacts import Draft, publish, read_manifest, staging
from engine.tracking import Tracker
from tasks.host import StageError
from tasks.inputs import RLHFConfig
from tasks.stages import evaluate_stage, plan_promotion, waits_for_approval


def test_a_first_model_without_a_gain_or_below_the_required_score_is_no_champion(
    bench: Bench,
) -> None:
    model = bench.model(seed=1)
    useless, good = bench.evaluation(model, 0), bench.evaluation(model, 20)
    assert not bench.promote(model, useless)["promoted"]
    decision = bench.promote(model, good, rules(minimum_score=0.4))
    assert "pass@1 is 50.00% [35.20%, 64.80%]; its lower end must be" in decision["reason"]
    assert champion() is None
    assert bench.promote(model, useless, rules(bootstrap=True))["promoted"]
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
    assert manifest.config["promote"] == RULES.model_dump(mode="json")
    measured = json.loads((bench.folder / "evidence.json").read_text())
    assert [measured["gain"][end] for end in ("mean", "low", "high")] == decision["gain"]
    assert [(o["rule"], o["passed"]) for o in decision["outcomes"]] == [
        ("problems", True), ("gain", True), ("contamination", True),
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
    strict = rules(max_length_ratio=2.0, max_kl=0.1, guards=(GuardConfig(data_source="nowhere"),))
    decision = bench.promote(model, evidence, strict)
    assert decision["promoted"] is False
    assert [o["rule"] for o in decision["outcomes"] if not o["passed"]] == [
        "guard pass_at_1 of nowhere", "kl", "length",
    ]  # fmt: skip
    assert "2.25 [2.2, 2.31] times as long" in decision["reason"]
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
    asked = rules(approval="required")
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    assert bench.promote(model, evidence, asked)["reason"].endswith("a person's approval.")
    assert waits_for_approval(promotion=FlyteDirectory(str(bench.folder))) is True
    assert champion() == digest(current_champion)
    decision = bench.promote(model, evidence, asked, approved_by="ada")
    assert "approved by ada" in decision["reason"]
    assert waits_for_approval(promotion=FlyteDirectory(str(bench.folder))) is False
    assert champion() == digest(model)
    assert Champions(Tracker(), NAME).history()[-1].by == "ada"
    worse = bench.model(seed=3)
    declined = bench.promote(worse, bench.evaluation(worse, 0), asked)["model_version"]
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
    bench = make_bench(seed=0, hard=20)
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 20)  # all of test right, none of hard
    all_sets = bench.promote(model, evidence, rules(dataset="all"))
    assert not all_sets["promoted"]
    assert "hard: pass@1 gain +0.00 percentage points" in all_sets["reason"]
    assert all_sets["gain"][0] == 0
    assert [(o["rule"], o["passed"]) for o in all_sets["outcomes"]] == [
        ("problems on test", True), ("gain on test", True), ("contamination on test", True),
        ("problems on hard", True), ("gain on hard", False), ("contamination on hard", True),
    ]  # fmt: skip
    measured = json.loads((bench.folder / "evidence.json").read_text())
    assert measured["sets"]["test"]["gain"]["mean"] == 1.0
    with pytest.raises(StageError, match="the evaluation has no set 'easy', but test, hard"):
        bench.promote(model, evidence, rules(dataset="easy"))
    guard = GuardConfig(dataset="hard", metric="pass_at_1")
    unsure = bench.promote(model, evidence, rules(guards=(guard,)))
    assert "pass_at_1 of hard changes by +0.00" in unsure["reason"]
    assert champion() is None
    guard = guard.model_copy(update={"tolerance": 0.25})
    assert bench.promote(model, evidence, rules(guards=(guard,)))["promoted"]


def test_a_champion_of_other_problems_is_evaluated_on_these(
    bench: Bench, current_champion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_bench(seed=5)
    model = other.model(seed=2)
    decision = other.promote(model, other.evaluation(model, 12))
    assert "evaluating the champion" in capsys.readouterr().out
    # Its weights are random, so on these problems it solves none, whatever it did on its own.
    assert decision["gain"][0] == pytest.approx(12 / 40)
    assert decision["promoted"] is True


def test_a_champion_with_a_spoilt_evaluation_is_evaluated_anew(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    first = bench.model(seed=1)
    evidence = bench.evaluation(first, 20)
    bench.promote(first, evidence)
    spoil(evidence)
    model = bench.model(seed=2)
    decision = bench.promote(model, bench.evaluation(model, 12))
    assert "recorded evaluation can't be used" in capsys.readouterr().out
    assert decision["gain"][0] == pytest.approx(12 / 40)


def longer(bench: Bench) -> Bench:
    """The same problems, answered with a larger budget of tokens."""
    return replace(bench, data=bench.data.model_copy(update={"max_response_length": 8}))


def test_a_champion_of_another_budget_of_tokens_is_evaluated_under_this_one(
    bench: Bench, current_champion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = longer(bench)
    model = other.model(seed=2)
    decision = other.promote(model, other.evaluation(model, 12))
    assert "evaluating the champion" in capsys.readouterr().out
    assert decision["gain"][0] == pytest.approx(12 / 40), "not 20 of 40 with fewer tokens"
    lengths = pd.read_parquet(other.folder / "rows_champion.parquet")["greedy_length"]
    assert lengths.max() > 4


def test_a_champion_whose_evaluation_has_no_record_of_its_budget_is_evaluated_anew(
    bench: Bench, current_champion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(bench.evaluation(current_champion, 20, recorded=False))
    model = bench.model(seed=2)
    decision = bench.promote(model, bench.evaluation(model, 12))
    assert "has no record of its settings 'data'" in capsys.readouterr().out
    assert decision["gain"][0] == pytest.approx(12 / 40)


def record(evidence: Path) -> None:
    """Make this the recorded evaluation of version 1."""
    client, own = Tracker().client, read_manifest(evidence).own_digest
    client.set_model_version_tag(NAME, "1", "evaluation_uri", str(evidence))
    client.set_model_version_tag(NAME, "1", "evaluation_manifest", own)


def test_a_champion_judged_by_another_seed_scorer_or_code_is_evaluated_anew(
    bench: Bench,
    current_champion: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    with monkeypatch.context() as before:
        before.setattr(engine.storage.digests, "sources_digest", lambda: "0" * 64)
        record(bench.evaluation(current_champion, 20, changed={"seed": 1, "scorer": "judge"}))
        old = bench.evaluation(model, 35)
    decision = bench.promote(model, evidence)
    said = "it differs from the new model's in scorer, seed, the code"
    assert said in " ".join(capsys.readouterr().out.split())
    assert decision["gain"][0] == pytest.approx(36 / 40), "not 16 of 40 by another measure"
    Champions(Tracker(), NAME).rollback("judged again")
    with pytest.raises(StageError, match=r"made by other code .* evaluate the model again"):
        bench.promote(model, old)
    assert champion() == digest(current_champion)


def test_what_two_evaluations_must_share(bench: Bench) -> None:
    one = read_manifest(bench.evaluation(bench.model(seed=1), 20))
    assert incomparable(one, one) == []
    asked = one.config["evaluate"]
    for key, value, said in (
        ("seed", 1, "seed"),
        ("scorer", "judge", "scorer"),
        ("data", {"max_response_length": 8}, "data.max_response_length"),
        ("evaluate", {**asked, "temperature": 0.5}, "evaluate.temperature"),
        ("evaluate", {**asked, "engine": "vllm"}, "evaluate.engine"),
    ):
        other = one.model_copy(update={"config": {**one.config, key: value}})
        assert incomparable(one, other) == [said]
    assert incomparable(one, one.model_copy(update={"sources_digest": "0"})) == ["the code"]


def test_an_evaluation_with_other_settings_than_the_promotion_promotes_nobody(
    bench: Bench, current_champion: Path
) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    said = r"data.max_response_length is {}, and the evaluation \w+ was made with 4; give"
    with pytest.raises(StageError, match=said.format(8)):
        longer(bench).promote(model, evidence)
    with pytest.raises(
        StageError, match=r"has no record of its settings 'data'.* evaluate the mod"
    ):
        bench.promote(model, bench.evaluation(model, 36, recorded=False))
    assert champion() == digest(current_champion)
    given = {
        "dataset": FlyteDirectory(str(bench.dataset)),
        "policy": FlyteDirectory(str(model)),
        "evaluation": FlyteDirectory(str(evidence)),
        "seed": 0,
        "profile": "laptop",
    }
    with pytest.raises(StageError, match=said.format(64)):
        plan_promotion(config=RLHFConfig(), **given)
    with pytest.raises(StageError, match=r"evaluate\.\w+ is .* was made with"):
        plan_promotion(config=RLHFConfig(data=bench.data), **given)
    same = RLHFConfig(data=bench.data, evaluate=EVALUATE)
    with pytest.raises(StageError, match=r"seed is 1, and the evaluation \w+ was made with 0"):
        plan_promotion(config=same, **{**given, "seed": 1})
    assert plan_promotion(config=same, **given).promotion.evaluate.scorer == EVALUATE.scorer
    stricter = RLHFConfig(data=bench.data, evaluate=EVALUATE, rl={"reward": {"name": "math"}})
    with pytest.raises(StageError, match=r"scorer is 'math', .* was made with 'answer_match'"):
        plan_promotion(config=stricter, **given)


def test_the_evaluation_of_a_run_records_what_it_is_compared_by(bench: Bench) -> None:
    model = bench.model(seed=1)
    output = evaluate_stage(
        run=new_run(),
        dataset=FlyteDirectory(str(bench.dataset)),
        warm_start=FlyteDirectory(str(model)),
        policy=FlyteDirectory(str(model)),
        settings=EvaluationSettings(data=bench.data, config=EVALUATE, seed=0),
    ).evaluation
    config = read_manifest(output.path).config
    assert config == comparable_settings(bench.data, EVALUATE, 0)
    assert (config["seed"], config["scorer"]) == (0, "answer_match")
    assert config["data"] == {"max_response_length": 4}
    assert bench.promote(model, Path(output.path), rules(bootstrap=True))["promoted"]


def copy_of(version: str) -> Path:
    """Where MLflow keeps a version's files."""
    return Path(Tracker().model_version(f"models:/{NAME}/{version}").source.removeprefix("file://"))


def test_a_champion_whose_copy_in_mlflow_was_replaced_is_not_compared_with(
    bench: Bench, current_champion: Path
) -> None:
    shutil.rmtree(copy_of("1"))
    shutil.copytree(bench.model(seed=3), copy_of("1"))
    said = r"champion can't be compared with: .* where its tag artifact_digest says .*rollback"
    model, other = bench.model(seed=2), make_bench(seed=5)
    with pytest.raises(StageError, match=said):
        bench.promote(model, bench.evaluation(model, 36))
    with pytest.raises(StageError, match=said):  # where it would be evaluated now
        other.promote(model, other.evaluation(model, 36))
    assert champion() == digest(current_champion)
    Champions(Tracker(), NAME).rollback("the champion's files were replaced", to="2", force=True)
    assert champion() == digest(model)


def test_a_champion_that_nothing_is_recorded_of_is_not_compared_with(bench: Bench) -> None:
    client = Tracker().client
    client.create_registered_model(NAME)
    client.create_model_version(NAME, str(bench.model(seed=3)))
    client.set_registered_model_alias(NAME, "champion", "1")
    model = bench.model(seed=2)
    with pytest.raises(StageError, match=r"version 1 has no tag artifact_digest .* was moved"):
        bench.promote(model, bench.evaluation(model, 36))
    assert champion_version() == "1"


def champion_version() -> str | None:
    found = Tracker().champion(NAME)
    return found.version if found else None


def stage_of(run_id: str) -> str:
    """Where MLflow has a run: `active`, or `deleted`, in its trash."""
    return str(Tracker().client.get_run(run_id).info.lifecycle_stage)


def test_asked_twice_or_tried_again_a_promotion_leaves_the_model_out_of_the_trash(
    bench: Bench,
) -> None:
    asked, run, model = rules(approval="required"), new_run(), bench.model(seed=1)
    evidence = bench.evaluation(model, 20)
    assert not bench.promote_in(run, model, evidence, asked)["promoted"]
    first = bench.folder
    assert bench.promote_in(run, model, evidence, asked, "ada")["promoted"]
    for folder in (first, bench.folder):
        assert stage_of(read_manifest(folder).mlflow_run) == "active"
    assert bench.promote_in(run, model, evidence, asked, "ada")["promoted"]
    current_champion = Tracker().champion(NAME)
    assert current_champion is not None
    assert current_champion.run_id == run.mlflow_run
    assert stage_of(current_champion.run_id) == "active"


def test_a_model_of_an_attempt_that_was_lost_is_registered_under_a_run_that_stays(
    bench: Bench,
) -> None:
    tracker, run = Tracker(), new_run()
    with tracker.stage("rl", run.mlflow_run) as lost:
        model = bench.model(seed=1, mlflow_run=lost.run_id)
    with tracker.stage("rl", run.mlflow_run):
        pass  # the next attempt; it makes the same, and the artifact that is there stays
    assert stage_of(lost.run_id) == "deleted"
    assert bench.promote_in(run, model, bench.evaluation(model, 20))["promoted"]
    assert tracker.model_version(f"models:/{NAME}/1").run_id == run.mlflow_run
