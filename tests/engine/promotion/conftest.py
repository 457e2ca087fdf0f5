"""Models registered with MLflow: in a database, and where a test asks for it, with a server."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from thorough import and_slow

from engine.storage.artifacts import Draft, publish, staging
from engine.tracking import Tracker


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> str:
    store = tmp_path_factory.mktemp("store") / "mlflow.db"
    shutil.copy(mlflow_store, store)
    return f"sqlite:///{store}"


@pytest.fixture(params=and_slow(["database"], ["mlflow_address"]))
def tracker(request: pytest.FixtureRequest) -> Tracker:
    return Tracker(request.getfixturevalue(request.param), experiment="promotion")


@pytest.fixture
def empty_model(tracker: Tracker, request: pytest.FixtureRequest) -> str:
    """The name of a registered model without versions."""
    name: str = request.function.__name__
    tracker.client.create_registered_model(name)
    return name


@pytest.fixture
def model(tracker: Tracker, empty_model: str) -> str:
    """The name of a registered model with versions 1 to 3, no alias."""
    run = tracker.start_pipeline("models")
    for text in ("one", "two", "three"):
        tracker.register_model(make_model(empty_model + text), empty_model, run)
    return empty_model


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
