"""The registry's copies of models, and the runs that hold them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from promotion_bench import NAME, Bench, champion, digest, make_bench, new_run

from engine.config import PromoteConfig
from engine.promotion.champions import Champions
from engine.storage.artifacts import read_manifest
from engine.tracking import Tracker
from tasks.host import StageError


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
    rules, run, model = PromoteConfig(approval="required"), new_run(), bench.model(seed=1)
    evidence = bench.evaluation(model, 20)
    assert not bench.promote_in(run, model, evidence, rules)["promoted"]
    first = bench.folder
    assert bench.promote_in(run, model, evidence, rules, "ada")["promoted"]
    for asked in (first, bench.folder):
        assert stage_of(read_manifest(asked).mlflow_run) == "active"
    assert bench.promote_in(run, model, evidence, rules, "ada")["promoted"]
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
