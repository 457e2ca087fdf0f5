"""Ctrl-C in the middle of RL: a quiet end, nothing left behind."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import psutil
import pytest
from flyte_runs import PYFLYTE, WORKFLOW, Place, settings

DEADLINE_S = 15.0


@pytest.fixture(params=["local", "ray"])
def running(place: Place, request: pytest.FixtureRequest) -> subprocess.Popen[str]:
    """A run of an hour, at its second step; in a process group of its own."""
    long = {"rl": {"trainer": {"total_training_steps": 10_000, "placement": request.param}}}
    command = ["run", str(WORKFLOW), "rlhf", "--config", settings(long)]
    process = subprocess.Popen(
        [sys.executable, "-c", PYFLYTE, *command],
        env=place.environment({"RAY_TMPDIR": "/tmp"}),
        cwd=place.root / "work",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    watchdog = threading.Timer(400, process.kill)
    watchdog.start()
    for line in process.stdout:
        if line.startswith("rl    2/"):
            break
    watchdog.cancel()
    assert process.poll() is None, "the run ended before its second step"
    return process


def is_ray_worker(process: psutil.Process) -> bool:
    try:
        return "ray::" in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


@pytest.mark.slow
def test_ctrl_c_ends_cleanly(
    place: Place, running: subprocess.Popen[str], request: pytest.FixtureRequest
) -> None:
    family = psutil.Process(running.pid).children(recursive=True)
    on_ray = any(is_ray_worker(child) for child in family)
    assert on_ray == ("ray" in request.node.callspec.id)
    started = time.monotonic()
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert time.monotonic() - started < DEADLINE_S
    assert running.returncode == 130

    assert "rl: interrupted; the stages before it are cached, run again to continue" in out
    assert "Traceback" not in out + err
    assert len([line for line in err.splitlines() if line.strip() and "sft: " not in line]) <= 1

    _, alive = psutil.wait_procs(family, timeout=5)
    assert [child.name() for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
    assert list((place.artifacts / ".staging").glob("*")) == []
    assert not (place.artifacts / "artifacts" / "rl").exists()
    with sqlite3.connect(place.root / "mlflow.db") as database:
        runs = dict(database.execute("select name, status from runs").fetchall())
    statuses = {name.split("-")[0]: status for name, status in runs.items()}
    assert statuses == {
        "rlhf": "KILLED",
        "dataset": "FINISHED",
        "sft": "FINISHED",
        "rl": "KILLED",
    }
