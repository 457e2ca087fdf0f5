"""Model versions of a real MLflow store: where they come from, and whether anyone touched them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lineage_store import Run, edit, make_run

from engine.errors import LineageError
from engine.lineage.__main__ import main
from engine.lineage.audit import audit
from engine.lineage.lookup import review
from engine.storage.artifacts import read_manifest
from engine.tracking import Tracker
from engine.tracking.model_versions import ARTIFACT_TAG, MANIFEST_TAG

NAME = "policy"
CHAMPION = f"models:/{NAME}@champion"


@pytest.fixture
def run(tmp_path: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    shutil.copy(mlflow_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    made = make_run(tmp_path)
    register(made.rl)
    return made


def register(model: Path) -> Tracker:
    """Register a model, with the digest of its manifest, and make it champion."""
    tracker = Tracker()
    with tracker.stage("rl") as stage:
        tags = {MANIFEST_TAG: read_manifest(model).own_digest}
        version = tracker.register_model(model, NAME, stage.run_id, tags)
    tracker.set_alias(NAME, "champion", version, None)
    return tracker


def copy_of(tracker: Tracker) -> Path:
    """Where MLflow keeps the champion's files."""
    champion = tracker.champion(NAME)
    assert champion is not None
    return Path(champion.source.removeprefix("file://"))


def faults(reference: str | Path) -> list[str]:
    return [finding.text for finding in audit(review([str(reference)])).faults]


def test_a_version_leads_to_its_artifact_and_back(run: Run, capsys) -> None:
    found = review([CHAMPION])
    assert found.summary == (
        "6 nodes: 1 dataset, 1 evaluation, 1 model version, 1 rl, 1 sft, 1 source"
    )
    (version,) = found.starts
    assert version.label == f"{NAME} version 1"
    back = review([str(run.rl)])
    (again,) = [n for n in back.graph.nodes.values() if n.kind == "model_version"]
    assert again == version
    assert again.facts["aliases"] == "champion"
    assert main(["show", f"models:/{NAME}/1"]) == 0
    assert capsys.readouterr().out.startswith(f"{NAME} version 1")


def test_an_untouched_version_verifies(run: Run) -> None:
    assert faults(CHAMPION) == []


def test_an_edit_of_the_tips_manifest_shows_by_the_versions_tag(run: Run) -> None:
    shutil.rmtree(run.evaluation)
    edit(run.rl, metrics={"reward": 1.0})
    (fault,) = faults(CHAMPION)
    assert f"where {NAME} version 1 recorded" in fault
    (same,) = [f.text for f in audit(review([str(run.rl)], descendants=False)).faults]
    assert same == fault


def test_the_copy_that_is_served_is_checked(run: Run) -> None:
    copy = copy_of(Tracker())
    (copy / "content.txt").write_text("poisoned")
    (fault,) = faults(CHAMPION)
    assert "MLflow's copy" in fault
    assert "content.txt differs" in fault


def test_a_copy_replaced_by_another_whole_artifact(run: Run, tmp_path: Path) -> None:
    copy = copy_of(Tracker())
    shutil.rmtree(copy)
    shutil.copytree(run.sft, copy)
    found = " ".join(faults(CHAMPION))
    assert f"where the tag {ARTIFACT_TAG} says" in found
    assert f"where the tag {MANIFEST_TAG} says" in found


def test_a_version_whose_artifact_is_gone_resolves_to_mlflows_copy(run: Run) -> None:
    shutil.rmtree(run.rl)
    found = review([CHAMPION])
    (artifact,) = [n for n in found.graph.nodes.values() if n.kind == "rl"]
    assert artifact.uri == str(copy_of(Tracker()))
    assert audit(found).faults == ()


def test_a_tip_that_only_its_run_vouches_for(run: Run) -> None:
    tracker = Tracker()
    manifest = read_manifest(run.evaluation)
    with tracker.stage("evaluation") as stage:
        stage.set_tags({ARTIFACT_TAG: manifest.digest, MANIFEST_TAG: manifest.own_digest})
    found = audit(review([str(run.evaluation)], descendants=False))
    assert (found.faults, found.notes) == ((), ())
    edit(run.evaluation, metrics={"gain": 0.9})
    (fault,) = faults(run.evaluation)
    assert "where its run recorded" in fault


def test_a_version_whose_files_lie_in_another_kind_of_store_is_found(run: Run) -> None:
    """A tracking server's own addresses, as mlflow-artifacts:/…, are no store of ours."""
    tracker = Tracker()
    manifest = read_manifest(run.sft)
    with tracker.stage("sft") as stage:
        tracker.client.create_registered_model("served")
        tracker.client.create_model_version(
            "served",
            "mlflow-artifacts:/7/0123/artifacts/models/4567",
            run_id=stage.run_id,
            tags={ARTIFACT_TAG: manifest.digest, "artifact_uri": str(run.sft)},
        )
    found = review(["models:/served/1"])
    assert {node.kind for node in found.graph.nodes.values()} >= {"sft", "dataset", "evaluation"}


def test_a_version_without_tags_is_a_sentence(run: Run) -> None:
    tracker = Tracker()
    with tracker.stage("other") as stage:
        tracker.client.create_registered_model("bare")
        tracker.client.create_model_version("bare", "file:///nowhere", run_id=stage.run_id)
    with pytest.raises(LineageError, match="has no tag artifact_digest"):
        review(["models:/bare/1"])


def test_a_registry_that_does_not_answer_is_a_note(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "broken.db").write_text("not a database, " * 100)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'broken.db'}")
    assert main(["show", str(run.rl)]) == 0
    done = capsys.readouterr()
    assert "model versions and what runs recorded are not looked at" in done.err
    assert "evaluation" in done.out
    assert main(["show", str(run.rl), "--no-registry"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["show", CHAMPION, "--no-registry"]) == 1


def record_run(artifact: Path) -> None:
    """Note in MLflow what a stage's run notes of the artifact that it has published."""
    manifest = read_manifest(artifact)
    with Tracker().stage(manifest.kind) as stage:
        stage.set_tags({ARTIFACT_TAG: manifest.digest, MANIFEST_TAG: manifest.own_digest})


def test_an_artifact_that_was_lost_and_made_again_is_noted(run: Run) -> None:
    edit(run.dataset, metrics={"seconds": 3.0})  # the same content, another manifest
    (fault,) = faults(CHAMPION)
    assert "or the artifact was made again" in fault
    record_run(run.dataset)
    found = audit(review([CHAMPION]))
    assert found.faults == ()
    assert any("was made again after what came of it" in note.text for note in found.notes)


def test_an_edit_after_it_was_made_again_is_a_fault(run: Run) -> None:
    edit(run.dataset, metrics={"seconds": 3.0})
    record_run(run.dataset)
    edit(run.dataset, metrics={"seconds": 4.0})
    assert any("its parents, configuration or metrics were edited" in f for f in faults(CHAMPION))


def test_other_content_is_never_taken_for_made_again(run: Run) -> None:
    (run.dataset / "content.txt").write_text("poison")
    record_run(run.dataset)
    assert any("content.txt differs" in fault for fault in faults(CHAMPION))


def test_without_mlflow_s_word_it_stays_a_fault(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(run.dataset, metrics={"seconds": 3.0})
    record_run(run.dataset)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert any("or the artifact was made again" in fault for fault in faults(run.rl))
