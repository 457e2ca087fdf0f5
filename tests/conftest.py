"""What all tests share: how many examples a property is tried on, and what is made only once.

`HYPOTHESIS_PROFILE=many` (`make test-slow`) tries each property on many examples.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
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
# Some tests start processes after a tokenizer has been trained, of which it would warn.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray runs its workers at niceness 15, and beside the other tests' processes they would starve.
os.environ.setdefault("RAY_worker_niceness", "0")
# A timing beside other tests is no measure of the processor; `test_choices` tries both.
os.environ.setdefault("HYBRIDFLYTE_KERNELS", "AVX512-BF16")
# A server that is not there is asked as often as ever, without seconds between.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
# Where it is set, as in many containers, each process would compile all sources again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Fixtures that take seconds to make: files that use one stay in one process of pytest-xdist.
SHARED = {
    "ray_cluster": "ray",
    "ray_roles": "ray",
    "mlflow_address": "mlflow",
    "shared_subjects": "engines",
    "finished": "finished",
    "checkout": "package",
}


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in this hook, too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests for `--dist loadgroup`: a file's are a group, or several files' that share."""
    groups: dict[Path, str] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            if hasattr(item.module, "run_ranks"):
                groups[item.path] = "ranks"  # these share the process that ranks are forked from
            for fixture in item.fixturenames:
                if fixture in SHARED:
                    groups.setdefault(item.path, SHARED[fixture])
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(groups.get(item.path, item.path.stem)))


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
