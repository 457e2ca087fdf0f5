"""A run that is killed in the middle of a step's episodes is bit for bit the run that never was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.algorithms.correction import GAP_PREFIXES

SCRIPT = Path(__file__).with_name("killed_episodes.py")
ASKED = 4 * 4  # episodes of a step


def start(folder: Path, out: Path, log: Path, name: str) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(filter(None, [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH")]))
    out.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), str(out), f"digit_games:{name}"],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "NOTED_GAMES": str(log)},
    )


def asked(log: Path, what: str) -> int:
    return log.read_text().count(what) if log.exists() else 0


def history(out: Path) -> list[dict[str, Any]]:
    rows = json.loads((out / "history.json").read_text())
    times = ("perf/", "checkpoint/", "episode/environment_s", *GAP_PREFIXES)
    return [{k: v for k, v in row.items() if not k.startswith(times)} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SavedGame", "NotedGame"])
def test_a_kill_in_the_middle_of_a_step_leaves_no_trace(
    tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    begun, again = tmp_path / "begun", tmp_path / "again"
    assert start(tiny_folder, whole, tmp_path / "log", name).wait(600) == 0
    assert (asked(tmp_path / "log", "reset"), asked(tmp_path / "log", "step")) == (48, 144)

    first = start(tiny_folder, killed, begun, name)
    until = time.monotonic() + 300
    saved = killed / "checkpoints" / "episodes" / "rollout-00000-of-00001.safetensors"
    while asked(begun, "reset") < ASKED + 10 or not saved.exists():  # in the second step
        assert first.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(0.25)  # for a save
    first.kill()
    first.wait()
    assert start(tiny_folder, killed, again, name).wait(600) == 0

    if name == "SavedGame":  # what was saved of the second step isn't played again
        assert asked(again, "reset") <= 2 * ASKED - 6
        steps = asked(begun, "step") + asked(again, "step")
        assert 144 <= steps < 144 + 20
    else:  # but for what was over
        assert 2 * ASKED - 16 < asked(again, "reset") < 2 * ASKED
    assert not saved.exists()
    assert history(killed) == history(whole)
    one, two = (
        AutoModelForCausalLM.from_pretrained(out / "model").state_dict() for out in (whole, killed)
    )
    assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())
