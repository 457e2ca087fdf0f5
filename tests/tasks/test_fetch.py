"""Fetching a registered model: what MLflow holds is what the version's tags name, or it is refused.

From a shared store it is fetched in test_task_context.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.errors import LineageError
from engine.stages.fetch import resolve
from engine.storage.artifacts import Draft, publish, read_manifest, staging, verify
from engine.tracking import Tracker

NAME = "policy"
REFERENCE = f"models:/{NAME}/1"


@pytest.fixture
def tracker(tmp_path: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    shutil.copy(mlflow_store, tmp_path)
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return Tracker()


def make(text: str) -> Path:
    with staging("rl") as folder:
        (folder / "model.safetensors").write_text(text)
        return publish(folder, Draft(kind="rl", config={"text": text}))


def register(tracker: Tracker, folder: Path) -> Path:
    """Make a folder version 1; return where MLflow keeps its copy."""
    tracker.register_model(folder, NAME, tracker.start_pipeline("p"))
    return Path(tracker.model_version(REFERENCE).source.removeprefix("file://"))


def fetched() -> Path:
    return resolve(REFERENCE, "candidate", "hybridflyte")


def test_a_copy_is_fetched_and_one_that_was_replaced_is_not(tracker: Tracker) -> None:
    artifact = make("right")
    copy = register(tracker, artifact)
    shutil.rmtree(artifact)
    assert fetched() == artifact
    assert verify(artifact).config == {"text": "right"}
    shutil.rmtree(artifact)
    shutil.rmtree(copy)
    shutil.copytree(make("wrong"), copy)
    with pytest.raises(
        LineageError, match=r"policy version 1 is \w+ where its tag artifact_digest"
    ):
        fetched()
    assert not artifact.exists()


def test_a_copy_whose_manifest_was_replaced_is_not_fetched(tracker: Tracker) -> None:
    artifact = make("right")
    copy = register(tracker, artifact)
    shutil.rmtree(artifact)
    reword(copy)
    with pytest.raises(LineageError, match="where its tag manifest_digest says"):
        fetched()


def reword(artifact: Path) -> None:
    """Change what a manifest says of the same content."""
    words = json.loads((artifact / "manifest.json").read_text())
    words["metrics"] = {"reward": 1.0}
    (artifact / "manifest.json").write_text(json.dumps(words))


def test_an_artifact_here_with_other_words_stays_and_the_registered_one_goes_beside_it(
    tracker: Tracker,
) -> None:
    artifact = make("right")
    registered = read_manifest(artifact).own_digest
    register(tracker, artifact)
    reword(artifact)
    folder = fetched()
    assert folder.parent == artifact.parent
    assert read_manifest(folder).own_digest == registered
    assert read_manifest(artifact).metrics == {"reward": 1.0}
    assert fetched() == folder


def test_a_model_without_a_manifest_is_held_to_its_digest(tracker: Tracker, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "model.safetensors").write_text("right")
    copy = register(tracker, tmp_path / "plain")
    folder = fetched()
    assert read_manifest(folder).kind == "model"
    (copy / "model.safetensors").write_text("wrong")
    with pytest.raises(LineageError, match=r"tag artifact_digest says .* choose another version"):
        fetched()


def test_what_another_tool_registered_is_taken_and_that_is_said(
    tracker: Tracker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "model.safetensors").write_text("theirs")
    tracker.client.create_registered_model(NAME)
    for place in (tmp_path / "plain", make("whole")):
        tracker.client.create_model_version(NAME, place.as_uri())
    folder = fetched()
    assert (folder / "model.safetensors").read_text() == "theirs"
    assert read_manifest(folder).parents[0].uri == REFERENCE
    assert "policy version 1 has no tag artifact_digest: whether" in capsys.readouterr().out
    again = resolve(f"models:/{NAME}/2", "candidate", "hybridflyte")
    assert again == make("whole")
    assert "policy version 2 has no tag artifact_digest: whether" in capsys.readouterr().out
