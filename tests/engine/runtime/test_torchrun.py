"""The program of docs/hybrid-actor.md: alone, and as two ranks of a real torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def documented_program(folder: Path, saved: Path) -> str:
    text = (ROOT / "docs" / "hybrid-actor.md").read_text()
    (program,) = re.findall(r"```python\n(# train\.py\n.*?)```", text, flags=re.DOTALL)
    assert "path/to/model" in program
    assert "/tmp/hybrid-actor" in program
    return str(
        program.replace("path/to/model", str(folder)).replace("/tmp/hybrid-actor", str(saved))
    )


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout  # the lines of two ranks may mix


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_documented_program_learns(tiny_folder: Path, tmp_path: Path, ranks: int) -> None:
    program = tmp_path / "train.py"
    program.write_text(documented_program(tiny_folder, tmp_path / "saved"))
    said = run(str(program)) if ranks == 1 else run(*TORCHRUN, str(ranks), str(program))
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said)]
    assert len(losses) == 3 * ranks
    assert min(losses[-ranks:]) < losses[0]
    assert (tmp_path / "saved" / "model.safetensors").is_file()
