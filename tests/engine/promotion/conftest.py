"""Models registered with a real MLflow server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.storage.artifacts import publish, staging
from engine.storage.manifest import Draft
from engine.tracking import Tracker


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def tracker(mlflow_address: str) -> Tracker:
    return Tracker(mlflow_address, experiment="promotion")


@pytest.fixture
def model(tracker: Tracker, request: pytest.FixtureRequest) -> str:
    """The name of a registered model with versions 1 to 3, no alias."""
    name = request.node.name.replace("/", "_")
    run = tracker.start_pipeline("models")
    for text in ("one", "two", "three"):
        tracker.register_model(make_model(name + text), name, run)
    return name


def make_model(text: str) -> Path:
    with staging("rl") as folder:
        (folder / "model.safetensors").write_text(text)
        return publish(folder, Draft(kind="rl", config={"text": text}))


@pytest.fixture
def points_to(tracker: Tracker, model: str) -> Callable[[], str | None]:
    """The version that the champion's alias points to, asked of MLflow itself."""

    def ask() -> str | None:
        at = tracker.client.get_registered_model(model).aliases.get("champion")
        return None if at is None else str(at)

    return ask
