"""The rollback task: its artifact, its parents, and a second attempt of one execution."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.promotion.champions import Champions
from engine.storage.artifacts import Draft, publish, read_manifest, staging
from engine.tracking import Tracker
from tasks.host import StageError
from tasks.stages import rollback

NAME = "policy"


@pytest.fixture
def champions(tmp_path: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch) -> Champions:
    """A model of two versions, of which the second is champion after the first."""
    shutil.copy(mlflow_store, tmp_path)
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    tracker = Tracker()
    run = tracker.start_pipeline("models")
    found = Champions(tracker, NAME)
    before = None
    for text in ("one", "two"):
        with staging("rl") as folder:
            (folder / "model.safetensors").write_text(text)
            version = tracker.register_model(
                publish(folder, Draft(kind="rl", config={"text": text})), NAME, run
            )
        found.promote(version, before, text, request=text)
        before = version
    return found


def test_the_champion_before_is_restored_once_an_execution(champions: Champions) -> None:
    def attempt() -> Path:
        return Path(rollback(model_name=NAME, reason="worse in use", request="exec-1").path)

    folder = attempt()
    moved = json.loads((folder / "rollback.json").read_text())
    assert (moved["version"], moved["replaced"], moved["reason"]) == ("1", "2", "worse in use")
    tracker = champions.registry
    parents = {p.name: p.digest for p in read_manifest(folder).parents}
    assert parents == {
        name: tracker.model_version(f"models:/{NAME}/{number}").tags["artifact_digest"]
        for name, number in (("restored", "1"), ("left", "2"))
    }
    assert json.loads((attempt() / "rollback.json").read_text()) == moved
    assert len(champions.history()) == 3
    with pytest.raises(StageError, match="is the first champion"):
        rollback(model_name=NAME, reason="again")
    assert champions.history()[-1].version == "1"


def test_what_can_t_be_asked_moves_nothing(
    champions: Champions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StageError, match="reason is empty"):
        rollback(model_name=NAME, reason="")
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        with pytest.raises(StageError, match="connection refused"):
            rollback(model_name=NAME, reason="why")
    assert champions.history()[-1].version == "2"
