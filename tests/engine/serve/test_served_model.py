"""Which files are served for a reference, and which are refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from served import NAME, publish_model, register

from engine.errors import LineageError, ModelError, TrackingError
from engine.serve import resolve
from engine.storage.artifacts import read_manifest
from engine.storage.digests import tree_digest
from engine.tracking import Tracker


@pytest.fixture
def artifact(registry: Path, model_folder: Path) -> Path:
    made = publish_model(model_folder)
    register(made)
    return made


@pytest.mark.parametrize("reference", [f"models:/{NAME}@champion", f"models:/{NAME}/1"])
def test_a_version_is_mlflows_copy_with_the_registrys_digest(
    artifact: Path, tmp_path: Path, reference: str
) -> None:
    manifest = read_manifest(artifact)
    folder, identity = resolve(reference, tmp_path / "scratch")
    assert folder != artifact
    assert read_manifest(folder).digest == manifest.digest
    assert asdict(identity) == {
        "name": NAME, "reference": reference, "version": "1",
        "digest": manifest.digest, "manifest_digest": manifest.own_digest,
    }  # fmt: skip


def test_a_copy_that_is_not_the_registrys_record_is_refused(artifact: Path, tmp_path: Path) -> None:
    folder, _ = resolve(f"models:/{NAME}/1", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(LineageError, match=r"MLflow.s copy .* is damaged: .*config\.json differs"):
        resolve(f"models:/{NAME}/1", tmp_path)


def test_another_whole_artifact_in_the_copys_place_is_refused(
    artifact: Path, tmp_path: Path
) -> None:
    folder, _ = resolve(f"models:/{NAME}/1", tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"metrics": {"reward": 1.0}}))
    with pytest.raises(LineageError, match="where its tag manifest_digest says"):
        resolve(f"models:/{NAME}/1", tmp_path)


def test_a_version_without_a_record_is_refused(artifact: Path, tmp_path: Path) -> None:
    client = Tracker().client
    client.delete_model_version_tag(NAME, "1", "artifact_digest")
    with pytest.raises(LineageError, match="has no tag artifact_digest"):
        resolve(f"models:/{NAME}@champion", tmp_path)


def test_a_version_that_is_not_there_is_a_sentence(artifact: Path, tmp_path: Path) -> None:
    for missing in (f"models:/{NAME}@nobody", f"models:/{NAME}/7", "models:/other@champion"):
        with pytest.raises(TrackingError, match=missing):
            resolve(missing, tmp_path)


def test_a_folder_is_held_to_its_manifest(artifact: Path, tmp_path: Path) -> None:
    folder, identity = resolve(str(artifact), tmp_path, "mine")
    assert (folder, identity.name, identity.version) == (artifact, "mine", "")
    assert identity.digest == read_manifest(artifact).digest
    (artifact / "added.json").write_text("{}")
    with pytest.raises(LineageError, match=r"added\.json is in the folder but not in the manifest"):
        resolve(str(artifact), tmp_path)


def test_a_folder_without_a_manifest_is_known_by_its_content(
    model_folder: Path, tmp_path: Path
) -> None:
    _, identity = resolve(str(model_folder), tmp_path)
    assert (identity.name, identity.digest) == ("tiny-model", tree_digest(model_folder))
    assert identity.manifest_digest == ""
    with pytest.raises(ModelError, match=r"has no config.json; give a model's folder"):
        resolve(str(tmp_path), tmp_path)
