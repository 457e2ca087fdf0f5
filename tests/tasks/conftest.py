"""Fixtures of the promote task's tests."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from promotion_bench import Bench, champion, digest, make_bench

DATABASE = "mlflow.db"


@dataclass(frozen=True)
class Kept:
    """A folder as it was at two times. It is put back where it was, since artifacts name paths."""

    place: Path
    copies: Path
    bench: Bench
    champion: Path  # an artifact

    @classmethod
    def make(cls, root: Path, mlflow_store: Path) -> Kept:
        place, copies = root / "place", root / "copies"
        place.mkdir()
        shutil.copy(mlflow_store, place / DATABASE)
        with pytest.MonkeyPatch.context() as patch, entered(place, patch):
            bench = make_bench(seed=0)
            model, other = bench.model(seed=1), bench.model(seed=2)
            evidence = bench.evaluation(model, 20)
            bench.evaluation(other, 36)
            shutil.copytree(place, copies / "before")
            assert bench.promote(model, evidence)["promoted"] is True
            assert champion() == digest(model)
            shutil.copytree(place, copies / "after")
        bench.folder = Path()
        return cls(place, copies, bench, model)

    def put_back(self, when: str) -> None:
        """Make the folder what it was `before` the promotion, or `after` it."""
        copy = self.copies / when
        for path in self.place.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        shutil.copytree(
            copy, self.place, dirs_exist_ok=True, ignore=shutil.ignore_patterns(DATABASE)
        )
        # MLflow keeps the file open.
        with (
            contextlib.closing(sqlite3.connect(copy / DATABASE)) as source,
            contextlib.closing(sqlite3.connect(self.place / DATABASE)) as target,
        ):
            source.backup(target)


@contextlib.contextmanager
def entered(place: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process live there."""
    torch.set_num_threads(1)
    patch.setenv("HOME", str(place))
    patch.setenv("HYBRIDFLYTE_HOME", str(place / "hybridflyte"))
    patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place / DATABASE}")
    with contextlib.chdir(place):
        yield


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> Kept:
    return Kept.make(tmp_path_factory.mktemp("bench"), mlflow_store)


@pytest.fixture
def bench(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A registry without a champion, in the working directory."""
    kept.put_back("before")
    with entered(kept.place, monkeypatch):
        yield kept.bench.copy()


@pytest.fixture
def current_champion(kept: Kept, bench: Bench) -> Path:
    """A champion that solves 20 of 40 problems."""
    kept.put_back("after")
    return kept.champion
