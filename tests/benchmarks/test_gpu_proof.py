"""`make gpu-check` as a program: deadlines, causes, partial figures, and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.storage.filesystem import process_start

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PIECE = """
import json, subprocess, sys
from pathlib import Path

name, out = sys.argv[1], Path(sys.argv[sys.argv.index("--out") + 1])
figure = {"what": "speed", "value": 7.0, "unit": "ms", "limit": "< 8 ms", "ok": True}
out.write_text(json.dumps(figure) + "\\n")
print(sys.argv[4:])
if name == "switch":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(sys.argv[4]).write_text(str(child.pid))
    child.wait()
if name == "nccl":
    sys.exit("no\\nthis PyTorch has no NCCL | install it")
"""
MAIN = """
import sys
from pathlib import Path

sys.path.insert(0, {benchmarks!r})
import gpu_proof

gpu_proof.torch.cuda.is_available = lambda: True
gpu_proof.describe = lambda: "a machine"
gpu_proof.HERE = Path({here!r})
gpu_proof.main()
"""


@pytest.fixture
def gpu_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program with pieces of ours in place of those that need a device."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_proof

    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "gpu_pieces.py").write_text(PIECE)
    monkeypatch.setattr(gpu_proof, "HERE", tmp_path / "pieces")
    return gpu_proof


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.05)


def assert_ends(pid: int) -> None:
    wait_until(lambda: process_start(pid) is None, 10)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_late_piece_ends_with_all_it_started_and_keeps_its_figures(
    gpu_proof: Any, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    result = gpu_proof.run_piece("switch", [str(pid_file)], 4.0, tmp_path)
    assert result.cause == f"it was not done in 4 s, see {tmp_path}/gpu-report.logs/switch.log"
    assert [figure.value for figure in result.figures] == [7.0]
    assert_ends(int(pid_file.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_sigterm_ends_the_piece_that_runs(gpu_proof: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    main = MAIN.format(benchmarks=str(BENCHMARKS), here=str(gpu_proof.HERE))
    options = ["--pieces", "switch", "--out", str(tmp_path), str(pid_file)]
    with subprocess.Popen([sys.executable, "-c", main, *options]) as program:
        try:
            wait_until(lambda: pid_file.exists() and pid_file.read_text() != "", 60)
            program.terminate()
            assert program.wait(10) == 143
            assert_ends(int(pid_file.read_text()))
        finally:
            program.kill()


def test_a_piece_without_time_left_does_not_start(gpu_proof: Any, tmp_path: Path) -> None:
    result = gpu_proof.run_piece("switch", [], -1.0, tmp_path)
    assert result.cause == "the time of --limit-s was over; raise it"
    assert not (tmp_path / "gpu-report.logs").exists()


def test_the_report_has_every_figure_and_cause(gpu_proof: Any, tmp_path: Path) -> None:
    from gpu_proof import Figure, Machine, PieceResult, write_report

    results = [
        gpu_proof.run_piece("health", ["--n", "2"], 60.0, tmp_path),
        gpu_proof.run_piece("nccl", [], 60.0, tmp_path),
        PieceResult("step", 1.0, (Figure("MFU", 31.44, "%"), Figure("new", 9, "B", "0 B", False))),
    ]
    assert (tmp_path / "gpu-report.logs" / "health.log").read_text() == "['--n', '2']\n"
    assert [result.fault for result in results] == [
        "",
        f"this PyTorch has no NCCL | install it (see {tmp_path}/gpu-report.logs/nccl.log)",
        "new: 9 B (wanted 0 B)",
    ]
    machine = Machine("NVIDIA H200", 1, 140.5, {"torch": "2.13.0"}, "2026-11-23")
    files = write_report(tmp_path / "out", machine, results)
    assert [os.path.basename(file) for file in files] == ["gpu-report.json", "gpu-report.md"]
    report = json.loads(files[0].read_text())
    assert report["machine"]["device"] == "NVIDIA H200"
    assert [piece["ok"] for piece in report["pieces"]] == [True, False, False]
    lines = files[1].read_text().splitlines()
    assert lines[0] == "### NVIDIA H200"
    assert "`make gpu-check` on 1 × NVIDIA H200 (140 GiB), torch 2.13.0, 2026-11-23:" in lines
    assert "| health | speed | 7 ms | < 8 ms | ok |" in lines
    assert "| step | MFU | 31.4 % |  |  |" in lines
    assert "| step | new | 9 B | 0 B | **missed** |" in lines
    assert any(line.startswith("| nccl | this PyTorch has no NCCL \\| install") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["update", "sharded", "qlora"])
def test_pieces_that_train_run_without_a_device(piece: str, tmp_path: Path) -> None:
    """A fake process group and packed weights among them."""
    out = tmp_path / "figures.jsonl"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_pieces.py"), piece, "--tiny", f"--out={out}"],
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(figures) >= 4
    assert all(figure["value"] >= 0 for figure in figures)
