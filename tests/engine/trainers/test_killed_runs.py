"""A run that is killed again and again is bit for bit the run that never was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import load_model

SCRIPT = Path(__file__).with_name("runs_killed_at_random.py")
KILLS = 20


def trained(folder: Path, out: Path, kills: int, mode: str) -> list[list[int]]:
    paths = os.pathsep.join(filter(None, [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(out), str(kills), mode],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=900,
    )
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


def history(out: Path) -> list[dict[str, Any]]:
    rows = json.loads((out / "history.json").read_text())
    times = ("perf/", "checkpoint/", "async/")
    return [{k: v for k, v in row.items() if not k.startswith(times)} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_twenty_kills_leave_no_trace(tiny_folder: Path, tmp_path: Path, mode: str) -> None:
    [whole] = trained(tiny_folder, tmp_path / "whole", 0, mode)
    assert whole[:3] == [0, 24, 0]
    rounds = trained(tiny_folder, tmp_path / "killed", KILLS, mode)
    assert sum(killed for _, _, killed, _ in rounds) == KILLS
    assert sum(torn for *_, torn in rounds) > 0, "no kill hit a save"
    started = [begin for begin, *_ in rounds]
    assert started == sorted(started), "a durable step was lost"
    assert started[-1] > 5
    assert history(tmp_path / "killed") == history(tmp_path / "whole")
    one, two = (load_model(tmp_path / name / "model").state_dict() for name in ("whole", "killed"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
