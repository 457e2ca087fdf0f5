"""Fixtures of the promote task's tests."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from promotion_bench import Bench, champion, digest, make_bench


@pytest.fixture
def bench(tmp_path: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    torch.set_num_threads(1)
    shutil.copy(mlflow_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "hybridflyte"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    with contextlib.chdir(tmp_path):
        yield make_bench(seed=0)


@pytest.fixture
def current_champion(bench: Bench) -> Path:
    """A champion that solves 20 of 40 problems."""
    model = bench.model(seed=1)
    assert bench.promote(model, bench.evaluation(model, 20))["promoted"] is True
    assert champion() == digest(model)
    return model
