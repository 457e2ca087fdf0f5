"""Runs Python code in a separate process, whose crash or hang does not affect the caller."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# Lines that begin with @ are the code's own; libraries may print others. The probe ends with its
# caller, whatever ends that (Linux: PR_SET_PDEATHSIG).
PRELUDE = """
import ctypes, json, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the caller has ended")
def emit(**what): print("\\n@" + json.dumps(what), flush=True)
"""


def run_isolated(
    code: str, arguments: Sequence[str], deadline_s: float
) -> tuple[list[dict[str, Any]], str]:
    """Run the code; return what it emitted by `emit(name=value)`, and how it failed, if it did."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(os.getpid()), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # so that what a library starts can be ended with it
    )
    ended = ""
    try:
        output, _ = process.communicate(timeout=deadline_s)
        if process.returncode < 0:
            ended = f"it ended Python by {signal.Signals(-process.returncode).name}"
        elif process.returncode:
            ended = f"it ended Python with status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        ended = f"it was not done in {deadline_s:g} s"
    finally:
        if process.poll() is None:  # this process is being terminated
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [json.loads(x[1:]) for x in output.splitlines() if x.startswith('@{"')], ended
