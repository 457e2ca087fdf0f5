"""A real MLflow server of the tests' own, over any database."""

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
    """The server's address; it serves artifacts from `folder`, and ends with the block.

    Its application is started as by `mlflow server --workers 1`, but without that command, which
    would load MLflow once more, and without its job runners.
    """
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--port", str(port)]
    options = {  # of that command, as it hands them on
        "_MLFLOW_SERVER_FILE_STORE": store,
        "_MLFLOW_SERVER_REGISTRY_STORE": store,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "artifacts"),
    }
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "mlflow.server.fastapi_app:app"],
            cwd=folder,
            env=os.environ | options,
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
