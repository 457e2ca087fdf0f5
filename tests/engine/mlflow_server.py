"""A real `mlflow server` of the tests' own, over any database."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from engine.errors import TrackingError
from engine.tracking import Tracker

START_S = 300.0  # on a busy machine


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def mlflow_server(store: str, folder: Path) -> Iterator[str]:
    """The server's address; it serves artifacts from `folder`, and ends with the block."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", store, "--artifacts-destination", str(folder / "artifacts")]
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            # Without MLflow's job runners: seven processes that nobody here needs.
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    uri = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                Tracker(uri, "probe").check(timeout_s=2)
                break
            except TrackingError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.3)
        yield uri
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)
