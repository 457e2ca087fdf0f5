"""engine/cli/health_checks.py. What its callers find out by it: test_health_check.py."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from engine.cli.health_checks import run_isolated

SLEEPER = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1] + ".new").write_text(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(120)
"""


def test_what_a_probe_emits_is_returned_and_what_else_it_prints_is_not() -> None:
    code = 'print("@ home"); emit(arguments=sys.argv[1:]); print("{}", end=""); emit(last=True)'
    assert run_isolated(code, ["a b", "c"], 60.0) == (
        [{"arguments": ["a b", "c"]}, {"last": True}],
        "",
    )


def test_a_probe_does_not_outlive_a_caller_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "import sys; from engine.cli.health_checks import run_isolated; "
        "run_isolated(sys.argv[1], sys.argv[2:], 120.0)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code, SLEEPER, str(file)])
    try:
        until = time.monotonic() + 60
        while not file.exists():
            assert caller.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        probe = psutil.Process(int(file.read_text()))
    finally:
        caller.kill()
        caller.wait()
    try:
        probe.wait(30)
    except psutil.TimeoutExpired:
        probe.kill()
        raise
