"""A real PostgreSQL server of the tests' own, in a temporary folder, on a free port."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow_server import free_port

START_S = 120.0
USER = "tests"


def binaries() -> Path:
    """The folder of `initdb` and `postgres`; the test is skipped where there is none."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name))
    if not folders:
        pytest.skip("this machine has no PostgreSQL server (Debian: apt-get install postgresql)")
    return folders[-1]


def as_somebody() -> list[str]:
    """What to put before a command, for PostgreSQL refuses to be run by root."""
    if os.getuid() != 0:
        return []
    if not shutil.which("setpriv"):
        pytest.skip("PostgreSQL refuses to be run by root, and there is no setpriv to be another")
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


@contextlib.contextmanager
def postgres(database: str = "mlflow") -> Iterator[str]:
    """The address of an empty database, as SQLAlchemy and MLflow take it."""
    bin_, before = binaries(), as_somebody()
    # Not in pytest's folder, which is its user's alone; and a socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    if before:
        os.chown(folder, 65534, 65534)
    log, port = folder / "log", free_port()
    try:
        _run([*before, bin_ / "initdb", "-D", folder / "data", "-U", USER, "-A", "trust", "-N"])
        quick = ["-c", "fsync=off", "-c", "listen_addresses=127.0.0.1", "-k", str(folder)]
        command = [*before, bin_ / "postgres", "-D", folder / "data", "-p", str(port), *quick]
        with log.open("w") as out:
            server = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
        try:
            _wait(server, bin_, port, log)
            _run([bin_ / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", USER, database])
            # The driver by name: SQLAlchemy 2.1 takes another one by default than 2.0.
            yield f"postgresql+psycopg2://{USER}@127.0.0.1:{port}/{database}"
        finally:
            server.send_signal(signal.SIGINT)  # SIGTERM would wait for its clients
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(server: subprocess.Popen[bytes], bin_: Path, port: int, log: Path) -> None:
    """Return when the server answers."""
    ask = [bin_ / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
    deadline = time.monotonic() + START_S
    while subprocess.run(ask).returncode != 0:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
