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
MODES = ("sync", "one_step_off")
PARTS = 5  # of a mode's strikes, each a test of minutes
STRIKES = int(os.environ.get("STRIKES", "100"))  # of all modes and parts together
SEED = int(os.environ.get("STRIKES_SEED", random.SystemRandom().randrange(10**6)))
STEP_TIMEOUT_S = float(os.environ.get("STRIKES_STEP_TIMEOUT_S", "15"))
SLACK_S = 30.0  # of a busy machine, and of Ray's own deadlines
TIMEOUT_S = 1700.0  # of a part


def rounds(folder: Path, out: Path, mode: str, strikes: int, seed: int) -> list[dict[str, Any]]:
    paths = os.pathsep.join(filter(None, [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(out), mode, str(strikes), str(seed)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
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


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(mode: str, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of a run without strikes."""
    out = tmp_path_factory.mktemp("whole")
    [end] = rounds(tiny_folder, out, mode, 0, SEED)
    assert end == {"runs": 1, "left": [], "shm": []}
    return out / "model-0"


@pytest.mark.slow
@pytest.mark.timeout(1750)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_strike_leaves_a_trace(
    mode: str, part: int, whole: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    print(f"STRIKES_SEED={SEED}")
    count = max(1, STRIKES // (PARTS * len(MODES)))
    *strikes, end = rounds(tiny_folder, tmp_path, mode, count, SEED + part)
    for strike in strikes:
        print(json.dumps(strike))
        check(strike)
    assert (end["left"], end["shm"]) == ([], [])
    wanted = load_model(whole).state_dict()
    for number in range(end["runs"]):
        found = load_model(tmp_path / f"model-{number}").state_dict()
        assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items()), number
