"""A tiny model with its tokenizer, and a registry of one's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from served import SHAPE
from tiny_engine import write_tiny_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("served") / "tiny-model", SHAPE)


@pytest.fixture
def registry(tmp_path: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty MLflow store, in the folder that it is in."""
    shutil.copy(mlflow_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    return tmp_path
