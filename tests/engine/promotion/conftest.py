"""A real MLflow server, and models registered with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.artifacts import Draft, publish, staging
from engine.errors import TrackingError
from engine.tracking import Tracker


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `mlflow server` over SQLite; it answers on many threads at once."""
    folder = tmp_path_factory.mktemp("server")
    Tracker(f"sqlite:///{folder / 'server.db'}").check()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'server.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    log = folder / "log.txt"
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
        deadline = time.monotonic() + 300
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
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def tracker(server: str) -> Tracker:
    return Tracker(server, experiment="promotion")


@pytest.fixture
def model(tracker: Tracker, request: pytest.FixtureRequest) -> str:
    """The name of a registered model with versions 1 to 3, no alias."""
    name = request.node.name.replace("/", "_")
    run = tracker.start_pipeline("models")
    for text in ("one", "two", "three"):
        tracker.register_model(make_model(name + text), name, run)
    return name


def make_model(text: str) -> Path:
    with staging("rl") as folder:
        (folder / "model.safetensors").write_text(text)
        return publish(folder, Draft(kind="rl", config={"text": text}))


@pytest.fixture
def stands(tracker: Tracker, model: str) -> Callable[[], str | None]:
    """Where the champion's alias stands, asked of MLflow itself."""

    def ask() -> str | None:
        at = tracker.client.get_registered_model(model).aliases.get("champion")
        return None if at is None else str(at)

    return ask
