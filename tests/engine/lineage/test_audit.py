"""The audit of lineage: local, on S3, of registered models."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lineage_store import Run, edit, make, make_run, parent
from s3_server import environment, s3_server

from engine.checkpoint import CheckpointStore
from engine.errors import LineageError
from engine.lineage.__main__ import main
from engine.lineage.audit import Audit, audit
from engine.lineage.lookup import review, write_origin
from engine.storage.artifacts import Draft, read_manifest, verify
from engine.storage.digests import hash_file, hash_files
from engine.storage.filesystem import home
from engine.tracking import Tracker
from engine.tracking.model_versions import ARTIFACT_TAG, MANIFEST_TAG


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


def check(*references: Path | str, descendants: bool = False) -> Audit:
    names = [str(reference) for reference in references]
    return audit(review(names, registry=False, descendants=descendants))


def faults(*references: Path | str) -> list[str]:
    return [finding.text for finding in check(*references).faults]


def test_an_untouched_run_has_no_fault_and_one_note(run: Run) -> None:
    found = check(run.evaluation)
    assert found.faults == ()
    assert found.checked == 5
    (note,) = found.notes
    assert "evaluation" in note.text
    assert "no child, run or model version records its manifest's digest" in note.text


def test_what_a_child_in_the_store_recorded_counts_though_it_is_not_asked_for(run: Run) -> None:
    assert check(run.rl).notes == ()
    edit(run.rl, metrics={"reward": 1.0})
    (fault,) = faults(run.rl)
    assert "rl" in fault
    assert f"where evaluation {read_manifest(run.evaluation).digest[:12]} recorded" in fault


def test_a_poisoned_file_in_an_ancestor(run: Run) -> None:
    (run.dataset / "content.txt").write_text("poison")
    (fault,) = faults(run.evaluation)
    assert f"{run.dataset}: content.txt differs" in fault


def test_added_removed_and_linked_files(run: Run) -> None:
    (run.dataset / "more.txt").write_text("")
    (run.sft / "content.txt").unlink()
    (run.rl / "link").symlink_to(run.raw)
    found = " ".join(faults(run.evaluation))
    assert "more.txt is in the folder but not in the manifest" in found
    assert "content.txt is in the manifest but not in the folder" in found
    assert "link is a link" in found


def consistent_edit(folder: Path, **values: object) -> None:
    """An edit that keeps content digest and config digest right."""
    edit(folder, **values)
    assert read_manifest(folder)


EDITS: dict[str, Callable[[Run], object]] = {
    "parents": lambda run: edit(run.sft, parents=[]),
    "metrics": lambda run: edit(run.sft, metrics={"validation_loss": 0.1}),
    "code_version": lambda run: edit(run.sft, code_version="0" * 40),
    "created_at": lambda run: edit(run.sft, created_at="2001-01-01T00:00:00Z"),
    "mlflow_run": lambda run: edit(run.sft, mlflow_run="another"),
    "white space": lambda run: (run.sft / "manifest.json").write_text(
        (run.sft / "manifest.json").read_text() + " "
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_a_parents_manifest_shows_in_its_child(run: Run, name: str) -> None:
    EDITS[name](run)
    (fault,) = faults(run.rl)
    assert f"{run.sft}/manifest.json is of SHA-256" in fault
    assert f"where rl {read_manifest(run.rl).digest[:12]} recorded" in fault


def test_an_edit_with_a_recomputed_config_digest_is_found_as_well(run: Run) -> None:
    from engine.storage.artifacts import json_digest

    config = {"text": "innocent"}
    edit(run.sft, config=config, config_digest=json_digest(config))
    (fault,) = faults(run.evaluation)
    assert "recorded" in fault


def test_content_and_manifest_forged_together_are_a_missing_parent(run: Run) -> None:
    forged = make("sft", "forged")
    for name in ("content.txt", "manifest.json"):
        shutil.copy(forged / name, run.sft / name)
    (fault,) = faults(run.rl)
    assert "is missing" in fault
    assert f"where sft {read_manifest(forged).digest[:12]} is now" in fault


def test_a_child_edited_to_accept_a_forged_parent_is_found_one_further_down(run: Run) -> None:
    edit(run.sft, metrics={"validation_loss": 0.0})
    parents = json.loads((run.rl / "manifest.json").read_text())["parents"]
    parents[0]["manifest"] = read_manifest(run.sft).own_digest
    edit(run.rl, parents=parents)
    (fault,) = faults(run.evaluation)
    assert str(run.rl) in fault


@pytest.fixture
def copied(run: Run, tmp_path: Path) -> Callable[[Path], Path]:
    """The run's store, copied beside the original, which stays as it is."""
    store = shutil.copytree(run.rl.parents[1], tmp_path / "copy" / "artifacts")
    return lambda original: store / original.parent.name / original.name


def test_an_edit_in_a_copied_store_shows_though_the_original_is_whole(
    run: Run, copied: Callable[[Path], Path]
) -> None:
    assert faults(copied(run.rl)) == []
    edit(copied(run.dataset), metrics={"rows_train": 8.0})
    for asked in (run.rl, run.dataset):
        (fault,) = faults(copied(asked))
        assert f"{copied(run.dataset)}/manifest.json is of SHA-256" in fault
        assert "recorded" in fault
        assert faults(asked) == [], "the original"


def test_another_artifact_in_a_copied_store_is_not_the_parent(
    run: Run, copied: Callable[[Path], Path]
) -> None:
    forged = make("dataset", "poison")
    shutil.rmtree(copied(run.dataset))
    shutil.copytree(forged, copied(run.dataset))
    (fault,) = faults(copied(run.rl))
    assert f"is missing: it is not at {copied(run.dataset)}, where dataset" in fault


def test_missing_parents_and_changed_sources(run: Run) -> None:
    shutil.rmtree(run.sft)
    run.raw.write_text("changed")
    found = faults(run.evaluation)
    assert len(found) == 2
    assert any(f"is missing: it is not at {run.sft}" in text for text in found)
    assert any("raw.jsonl is now" in text for text in found)


def test_a_removed_source_is_a_fault_and_a_remote_one_a_note(run: Run) -> None:
    from engine.storage.artifacts import Parent

    run.raw.unlink()
    assert any("source" in text and "is missing" in text for text in faults(run.rl))
    away = Parent(name="hub", kind="source", digest="ab" * 32, uri="s3://nowhere/data")
    found = check(make("dataset", "from afar", away))
    assert found.faults == ()
    assert any("s3://nowhere/data is not on a disk" in note.text for note in found.notes)
    assert found.checked == 1


def test_descendants_are_checked_when_asked(run: Run) -> None:
    (run.evaluation / "content.txt").write_text("better than it was")
    assert check(run.sft).faults == ()
    (fault,) = check(run.sft, descendants=True).faults
    assert str(run.evaluation) in fault.text


def test_a_whole_store_is_checked_with_manifests_that_cannot_be_read(run: Run) -> None:
    assert check().faults == ()
    assert check().checked == 5
    (run.evaluation / "manifest.json").write_text("{")
    (run.dataset / "content.txt").write_text("poison")
    found = [finding.text for finding in check().faults]
    assert len(found) == 2
    assert any("can't read" in text and str(run.evaluation) in text for text in found)


def test_copies_of_equal_content_are_each_held_to_their_own_children(tmp_path: Path) -> None:
    first = make("sft", "weights", config={"lr": 1})
    second = make("sft", "weights", config={"lr": 2})
    make("rl", "one", parent("warm_start", first))
    make("rl", "two", parent("warm_start", second))
    assert faults(first, second) == []
    edit(second, metrics={"loss": 0.0})
    (fault,) = faults(second)
    assert str(second) in fault


def test_a_damaged_checkpoint_is_found(tmp_path: Path) -> None:
    from engine.checkpoint import CheckpointStore

    store = CheckpointStore(tmp_path / "ckpt")
    draft = store.begin(5)
    draft.state = {"step": 5}
    folder = Path(store.commit(draft).folder)
    assert faults(folder) == []
    (folder / "state.json").write_text((folder / "state.json").read_text().replace("5", "6"))
    (fault,) = faults(folder)
    assert "state.json differs from its checksum" in fault


NAME = "policy"


CHAMPION = f"models:/{NAME}@champion"


@pytest.fixture
def registered_run(
    tmp_path: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
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


def version_faults(reference: str | Path) -> list[str]:
    return [finding.text for finding in audit(review([str(reference)])).faults]


def test_a_version_leads_to_its_artifact_and_back(registered_run: Run, capsys) -> None:
    found = review([CHAMPION])
    assert found.summary == (
        "6 nodes: 1 dataset, 1 evaluation, 1 model version, 1 rl, 1 sft, 1 source"
    )
    (version,) = found.starts
    assert version.label == f"{NAME} version 1"
    back = review([str(registered_run.rl)])
    (again,) = [n for n in back.graph.nodes.values() if n.kind == "model_version"]
    assert again == version
    assert again.facts["aliases"] == "champion"
    assert main(["show", f"models:/{NAME}/1"]) == 0
    assert capsys.readouterr().out.startswith(f"{NAME} version 1")


def test_an_untouched_version_verifies(registered_run: Run) -> None:
    assert version_faults(CHAMPION) == []


def test_an_edit_of_the_tips_manifest_shows_by_the_versions_tag(registered_run: Run) -> None:
    shutil.rmtree(registered_run.evaluation)
    edit(registered_run.rl, metrics={"reward": 1.0})
    (fault,) = version_faults(CHAMPION)
    assert f"where {NAME} version 1 recorded" in fault
    (same,) = [f.text for f in audit(review([str(registered_run.rl)], descendants=False)).faults]
    assert same == fault


def test_the_copy_that_is_served_is_checked(registered_run: Run) -> None:
    copy = copy_of(Tracker())
    (copy / "content.txt").write_text("poisoned")
    (fault,) = version_faults(CHAMPION)
    assert "MLflow's copy" in fault
    assert "content.txt differs" in fault


def test_a_copy_replaced_by_another_whole_artifact(registered_run: Run, tmp_path: Path) -> None:
    copy = copy_of(Tracker())
    shutil.rmtree(copy)
    shutil.copytree(registered_run.sft, copy)
    found = " ".join(version_faults(CHAMPION))
    assert f"where its tag {ARTIFACT_TAG} says" in found
    assert f"where its tag {MANIFEST_TAG} says" in found


def test_a_version_whose_artifact_is_gone_resolves_to_mlflows_copy(registered_run: Run) -> None:
    shutil.rmtree(registered_run.rl)
    found = review([CHAMPION])
    (artifact,) = [n for n in found.graph.nodes.values() if n.kind == "rl"]
    assert artifact.uri == str(copy_of(Tracker()))
    assert audit(found).faults == ()


def test_a_tip_that_only_its_run_vouches_for(registered_run: Run) -> None:
    tracker = Tracker()
    manifest = read_manifest(registered_run.evaluation)
    with tracker.stage("evaluation") as stage:
        stage.set_tags({ARTIFACT_TAG: manifest.digest, MANIFEST_TAG: manifest.own_digest})
    found = audit(review([str(registered_run.evaluation)], descendants=False))
    assert (found.faults, found.notes) == ((), ())
    edit(registered_run.evaluation, metrics={"gain": 0.9})
    (fault,) = version_faults(registered_run.evaluation)
    assert "where its run recorded" in fault


def test_a_version_whose_files_lie_in_another_kind_of_store_is_found(registered_run: Run) -> None:
    """A tracking server's own addresses, as mlflow-artifacts:/…, are no store of ours."""
    tracker = Tracker()
    manifest = read_manifest(registered_run.sft)
    with tracker.stage("sft") as stage:
        tracker.client.create_registered_model("served")
        tracker.client.create_model_version(
            "served",
            "mlflow-artifacts:/7/0123/artifacts/models/4567",
            run_id=stage.run_id,
            tags={ARTIFACT_TAG: manifest.digest, "artifact_uri": str(registered_run.sft)},
        )
    found = review(["models:/served/1"])
    assert {node.kind for node in found.graph.nodes.values()} >= {"sft", "dataset", "evaluation"}


def test_a_version_without_tags_is_a_sentence(registered_run: Run) -> None:
    tracker = Tracker()
    with tracker.stage("other") as stage:
        tracker.client.create_registered_model("bare")
        tracker.client.create_model_version("bare", "file:///nowhere", run_id=stage.run_id)
    with pytest.raises(LineageError, match="has no tag artifact_digest"):
        review(["models:/bare/1"])


def test_a_registry_that_does_not_answer_is_a_note(
    registered_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "broken.db").write_text("not a database, " * 100)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'broken.db'}")
    assert main(["show", str(registered_run.rl)]) == 0
    done = capsys.readouterr()
    assert "model versions and what runs recorded are not looked at" in done.err
    assert "evaluation" in done.out
    assert main(["show", str(registered_run.rl), "--no-registry"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["show", CHAMPION, "--no-registry"]) == 1


def record_run(artifact: Path) -> None:
    """Note in MLflow what a stage's run notes of the artifact that it has published."""
    manifest = read_manifest(artifact)
    with Tracker().stage(manifest.kind) as stage:
        stage.set_tags({ARTIFACT_TAG: manifest.digest, MANIFEST_TAG: manifest.own_digest})


def test_an_artifact_that_was_lost_and_made_again_is_noted(registered_run: Run) -> None:
    edit(registered_run.dataset, metrics={"seconds": 3.0})  # the same content, another manifest
    (fault,) = version_faults(CHAMPION)
    assert "or the artifact was made again" in fault
    record_run(registered_run.dataset)
    found = audit(review([CHAMPION]))
    assert found.faults == ()
    assert any("was made again after what came of it" in note.text for note in found.notes)


def test_an_edit_after_it_was_made_again_is_a_fault(registered_run: Run) -> None:
    edit(registered_run.dataset, metrics={"seconds": 3.0})
    record_run(registered_run.dataset)
    edit(registered_run.dataset, metrics={"seconds": 4.0})
    assert any(
        "its parents, configuration or metrics were edited" in f for f in version_faults(CHAMPION)
    )


def test_other_content_is_never_taken_for_made_again(registered_run: Run) -> None:
    (registered_run.dataset / "content.txt").write_text("poison")
    record_run(registered_run.dataset)
    assert any("content.txt differs" in fault for fault in version_faults(CHAMPION))


def test_without_mlflow_s_word_it_stays_a_fault(
    registered_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(registered_run.dataset, metrics={"seconds": 3.0})
    record_run(registered_run.dataset)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert any(
        "or the artifact was made again" in fault for fault in version_faults(registered_run.rl)
    )


STORE = "s3://lineage/raw/artifacts"


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """A real S3 server in this process, and s3fs's settings to reach it."""
    import s3fs

    with s3_server() as endpoint, environment(AWS_ENDPOINT_URL=endpoint):
        yield s3fs.S3FileSystem()


@pytest.fixture
def bucket_run(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run whose artifacts are in the bucket alone."""
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    made = make_run(tmp_path)
    bucket.mkdir("lineage")
    bucket.put(str(home() / "artifacts"), "lineage/raw/", recursive=True)
    shutil.rmtree(home())
    yield made
    bucket.rm("lineage", recursive=True)


def remote(path: Path) -> str:
    return f"{STORE}/{path.parent.name}/{path.name}"


def test_relatives_are_found_in_the_bucket(bucket_run: Run) -> None:
    found = review([remote(bucket_run.rl)], registry=False)
    assert found.index.roots == (STORE,)
    assert found.summary == "5 nodes: 1 dataset, 1 evaluation, 1 rl, 1 sft, 1 source"
    assert {n.uri for n in found.graph.nodes.values() if n.manifest} == {
        remote(p)
        for p in (bucket_run.dataset, bucket_run.sft, bucket_run.rl, bucket_run.evaluation)
    }
    assert not os.path.exists(home())


def test_a_store_may_be_any_prefix(bucket_run: Run) -> None:
    found = review([str(bucket_run.raw)], ["s3://lineage"], registry=False)
    assert len(found.graph.nodes) == 5
    with pytest.raises(LineageError, match=r"no artifact was made from it in s3://lineage/none"):
        review([str(bucket_run.raw)], ["s3://lineage/none"], registry=False)


def test_verify_reads_the_bucket_and_not_a_copy(bucket_run: Run, bucket: Any, capsys) -> None:
    assert verify(remote(bucket_run.rl)).digest == read_manifest(remote(bucket_run.rl)).digest
    assert main(["verify", remote(bucket_run.rl)]) == 0
    bucket.pipe(f"{remote(bucket_run.sft)}/content.txt", b"poisoned")
    bucket.pipe(f"{remote(bucket_run.dataset)}/more.txt", b"")
    assert main(["verify", remote(bucket_run.rl)]) == 1
    said = capsys.readouterr().err
    assert "content.txt differs" in said
    assert "more.txt is in the folder but not in the manifest" in said


def test_an_edited_manifest_in_the_bucket(bucket_run: Run, bucket: Any, capsys) -> None:
    where = f"{remote(bucket_run.sft)}/manifest.json"
    bucket.pipe(where, bucket.cat_file(where).replace(b"0.5", b"0.1"))
    assert main(["verify", remote(bucket_run.rl)]) == 1
    assert "its parents, configuration or metrics were edited" in capsys.readouterr().err


def test_a_removed_parent_in_the_bucket(bucket_run: Run, bucket: Any, capsys) -> None:
    bucket.rm(remote(bucket_run.sft), recursive=True)
    assert main(["verify", remote(bucket_run.rl)]) == 1
    assert "sft" in capsys.readouterr().err


def test_remote_hashes_equal_local_ones(bucket: Any, bucket_run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "big"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "weights.bin").write_bytes(os.urandom(9 << 20))
    (folder / "empty").write_bytes(b"")
    bucket.put(str(folder), "lineage/big", recursive=True)
    found = hash_files("s3://lineage/big")
    assert found == hash_files(folder)
    assert found["deep/weights.bin"].sha256 == hash_file(folder / "deep" / "weights.bin")


def test_checkpoints_in_the_bucket_lead_to_their_parents(bucket_run: Run, capsys) -> None:
    manifest = read_manifest(remote(bucket_run.rl))
    root = "s3://lineage/checkpoints"
    write_origin(root, Draft(kind="rl", parents=manifest.parents, config=manifest.config))
    store = CheckpointStore(root)
    draft = store.begin(5)
    draft.state = {"step": 5}
    folder = store.commit(draft).folder
    found = review([folder], ["s3://lineage"], registry=False)
    assert {node.kind for node in found.graph.nodes.values()} == {
        "checkpoint", "dataset", "evaluation", "rl", "sft", "source",
    }  # fmt: skip
    assert main(["verify", folder, "--store", "s3://lineage"]) == 0


def test_what_is_not_there_and_who_may_not_read_it_are_sentences(bucket_run: Run, capsys) -> None:
    with pytest.raises(LineageError, match="does not exist; check the address"):
        hash_files("s3://lineage/none")
    assert main(["show", "s3://lineage/none"]) == 1
    assert "has no manifest.json" in capsys.readouterr().err
    assert main(["show", "s3://nobody/none", "--store", "s3://nobody"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
