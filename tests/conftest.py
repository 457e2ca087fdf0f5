"""What all tests share: how many examples a property is tried on, and what is made only once.

`HYPOTHESIS_PROFILE=many` (`make test-slow`) tries each property on many examples.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shlex
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from forks import ENDED, freeze, interpreter, start_loader, unfreeze
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
# A server that is not there is asked as often as ever, without seconds between.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
# Where it is set, as in many containers, each process would compile all sources again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


_LONG_S = 1700.0
_TESTS = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Load all tests without looking for garbage, and never look for it among what they loaded."""
    gc.disable()
    try:
        return (yield)
    finally:
        freeze()
        gc.enable()
        atexit.register(unfreeze)  # libraries count what is left behind
        # vLLM freezes at an engine's start and unfreezes at its end, what the tests are as well.
        gc.freeze = gc.unfreeze = lambda: None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Let the processes that run tests be forks of one that has loaded them."""
    folder = Path(tempfile.mkdtemp(prefix="tests-"))
    config.add_cleanup(lambda: shutil.rmtree(folder))
    loader = start_loader(list(config.invocation_params.args), folder)
    config.add_cleanup(loader.communicate)
    for spec in specs:
        errors = folder / f"{spec.id}.log"
        spec.python = shlex.join(interpreter(errors))
        config.pluginmanager.register(_Crash(errors))


class _Crash:
    """Shows at the end what a process that crashed has written: a signal, all threads' stacks."""

    def __init__(self, errors: Path) -> None:
        self.errors = errors

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        text = self.errors.read_text(errors="replace") if self.errors.exists() else ""
        if ENDED in text:
            terminalreporter.section(f"stderr of {self.errors.stem}, which crashed")
            terminalreporter.write(text)


@pytest.hookimpl(trylast=True)  # after those that are not wanted are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each process begin with what would cost more if others had it as well.

    These are the tests of many minutes, which would keep the last process busy alone and want the
    memory that shared engines take later, and those that share what takes seconds to make. xdist
    gives each process a stretch of the tests, and the last ones of a stretch to who has none left:
    what begins a stretch stays in one process.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for number, item in enumerate(item for item in items if _timeout_s(item) > _LONG_S):
        first[number % workers].append(item)
    for place, item in sorted(_sharing(items), key=lambda found: found[0]):
        first[place[0] % workers].append(item)
    placed = {item for stretch in first for item in stretch}
    rest = [item for item in items if item not in placed]
    items[:] = []
    for stretch in first:
        others = max(0, (len(placed) + len(rest)) // workers - len(stretch))
        items += stretch + rest[:others]
        del rest[:others]
    items += rest


def _sharing(items: list[pytest.Item]) -> Iterator[tuple[tuple[int, int], pytest.Item]]:
    """The tests that share something, with the process that has it and when that process does."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        folder = item.path.relative_to(_TESTS).parts[:-1]
        if _timeout_s(item) > _LONG_S:
            continue
        if folder == (
            "workflows",
        ):  # packages, a cluster, runs; first the run that others wait for
            yield (0, "finished" not in fixtures), item
        elif fixtures & {"ray_cluster", "ray_roles"}:
            yield (1, 0), item
        elif fixtures & {"mlflow_address", "on_postgres", "bucket"}:
            yield (2, 0), item


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
