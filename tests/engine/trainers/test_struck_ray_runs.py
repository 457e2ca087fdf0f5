"""Runs on Ray whose actors, node and driver are killed and stopped end as those never touched."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import load_model

SCRIPT = Path(__file__).with_name("ray_runs_struck_at_random.py")
STRIKES = int(os.environ.get("STRIKES", "100"))  # of all modes together
SEED = int(os.environ.get("STRIKES_SEED", random.SystemRandom().randrange(10**6)))
STEP_TIMEOUT_S = float(os.environ.get("STRIKES_STEP_TIMEOUT_S", "15"))
SLACK_S = 30.0  # of a busy machine, and of Ray's own deadlines


def rounds(folder: Path, out: Path, mode: str, strikes: int) -> list[dict[str, Any]]:
    paths = os.pathsep.join(filter(None, [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(out), mode, str(strikes), str(SEED)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1700,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(strike: dict[str, Any]) -> None:
    target, error = strike["target"], strike["error"]
    assert not strike["hung"], strike
    assert not strike["orphans"], strike
    if target == "driver" or strike["done"]:
        return
    stopped = strike["signal"] == "SIGSTOP"
    assert strike["noticed_s"] < (STEP_TIMEOUT_S if stopped else 0.0) + SLACK_S, strike
    if target == "node":  # killed, it may take the driver with it, by Ray's own hand
        assert not stopped or "Ray node" in error or "gave no result within" in error, strike
        return
    assert any(role in error for role in target.split("+")), strike
    assert ("gave no result within" if stopped else "the worker process died") in error, strike


@pytest.mark.slow
@pytest.mark.timeout(1750)
@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_no_strike_leaves_a_trace(tiny_folder: Path, tmp_path: Path, mode: str) -> None:
    print(f"STRIKES_SEED={SEED}")
    [whole] = rounds(tiny_folder, tmp_path / "whole", mode, 0)
    assert whole == {"runs": 1, "left": [], "shm": []}
    *strikes, end = rounds(tiny_folder, tmp_path / "struck", mode, max(1, STRIKES // 2))
    for strike in strikes:
        print(json.dumps(strike))
        check(strike)
    assert (end["left"], end["shm"]) == ([], [])
    wanted = load_model(tmp_path / "whole" / "model-0").state_dict()
    for number in range(end["runs"]):
        found = load_model(tmp_path / "struck" / f"model-{number}").state_dict()
        assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items()), number
