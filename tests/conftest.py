"""What all tests share: how many examples a property is tried on, and what is made only once.

`HYPOTHESIS_PROFILE=many` (`make test-slow`) tries each property on many examples.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings
from once import MakeOnce

# A loaded machine is no failure of the code under test, so that no example has a deadline.
settings.register_profile("few", max_examples=15, deadline=None)
settings.register_profile("many", max_examples=100, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))

# Torch, which most tests import before `engine`, reads this when it is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# Ray runs its workers at niceness 15, and beside the other tests' processes they would starve.
os.environ.setdefault("RAY_worker_niceness", "0")


_LONG_S = 1700.0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Load all tests without looking for garbage, and never look for it among what they loaded."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries count what is left behind


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """One process at a time loads a file, and compiles it and what it imports for the others."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


@pytest.hookimpl(trylast=True)  # after those that are not wanted are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what would keep the last process busy alone, each in a process of its own.

    The tests of half an hour, and those that read the finished run one at a time. xdist gives each
    process a stretch of the tests, and the last ones of a stretch to who has none left.
    """
    long = [item for item in items if _timeout_s(item) > _LONG_S]
    shared = [item for item in items if "finished" in getattr(item, "fixturenames", ())]
    rest = [item for item in items if item not in long and item not in shared]
    stretch = len(items) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for number, first in enumerate([*([item] for item in long), shared]):
        rest[number * stretch : number * stretch] = first
    items[:] = rest


def _timeout_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker and marker.args else 0.0


@pytest.fixture(scope="session", autouse=True)
def _process_that_ranks_are_forked_from() -> None:
    if "gloo_ranks" in sys.modules:
        sys.modules["gloo_ranks"].copy_process()


@pytest.fixture(scope="session")
def make_once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> MakeOnce:
    """`make_once(name, write)`: a folder that `write(folder)` fills, once for all workers.

    The others wait for it. A `write` that failed is tried again by the next who asks.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent

    def make(name: str, write: Callable[[Path], None]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                write(folder)
                done.touch()
        return folder

    return make


@pytest.fixture(scope="session")
def mlflow_store(make_once: MakeOnce) -> Path:
    """An MLflow database to copy; its migrations, which take seconds, are done.

    From here on this process's databases don't wait for the disk at each of MLflow's commits.
    """
    import sqlalchemy

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", _skip_fsync)

    def write(folder: Path) -> None:
        from engine.tracking.connection import Connection

        _ = Connection(f"sqlite:///{folder / 'mlflow.db'}").client

    return make_once("mlflow-store", write) / "mlflow.db"


def _skip_fsync(connection: Any, record: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        # A file that is no database fails at its first use, as it does without this.
        with contextlib.suppress(sqlite3.DatabaseError):
            connection.execute("PRAGMA synchronous = OFF")
