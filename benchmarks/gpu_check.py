"""`make gpu-check`: what has to be seen on a real GPU, in below ten minutes.

Pieces, each in a process of its own with a deadline: the health check, collectives over NCCL,
HybridActor's switch against a reload, memory against the planner's estimate, a GRPO step with its
MFU, tokens a second of the rollout engines, what vLLM gives back between rollouts, and the tests
marked gpu. One that fails is reported with its cause, and the others go on. Writes
`gpu-report.json` and, for the docs, `gpu-report.md`.
Exit status: 0; 1 where a piece failed or a figure misses its limit, or without a GPU; 143 after
SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from gpu_report import Machine, PieceResult, read_figures, write_report

HERE = Path(__file__).parent
SECONDS = {  # a piece may take; together it is --limit-s that counts
    "health": 120,
    "nccl": 60,
    "switch": 150,
    "memory": 90,
    "step": 120,
    "rollout": 180,
    "sleep": 90,
    "tests": 300,
}


def main() -> None:
    args, passed = parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the piece
    if not torch.cuda.is_available():
        sys.exit(
            "no GPU: PyTorch sees no CUDA or ROCm device; run make gpu-check on a machine with "
            "one, in an environment made there (make env)"
        )
    machine = describe()
    say(f"{machine}; at most {args.limit_s / 60:.0f} minutes")
    begin, results = time.monotonic(), list[PieceResult]()
    for number, name in enumerate(args.pieces, 1):
        left = args.limit_s - (time.monotonic() - begin)
        say(f"[{number}/{len(args.pieces)}] {name} …")
        result = run_piece(name, passed, min(left, SECONDS[name]), args.out)
        results.append(result)
        for figure in result.figures:
            mark = "" if figure.ok else f"   MISSED, wanted {figure.limit}"
            say(f"      {figure.what}: {figure.text}{mark}")
        say(
            f"      {'FAILED: ' + result.cause if result.cause else 'done'}, {result.seconds:.0f} s"
        )
    files = write_report(args.out, machine, results)
    say(f"wrote {' and '.join(map(str, files))}")
    faults = [f"{result.name}: {result.fault}" for result in results if result.fault]
    if faults:
        sys.exit("\n".join([f"{len(faults)} of {len(results)} pieces have faults:", *faults]))


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Ours, and what is passed on to the pieces (`gpu_pieces.py PIECE --help`)."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Other options are those of the pieces: python benchmarks/gpu_pieces.py step --help",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the report")
    parser.add_argument("--limit-s", type=float, default=570.0, help="of all pieces together")
    parser.add_argument(
        "--pieces", type=lambda text: text.split(","), default=list(SECONDS), help="and their order"
    )
    args, passed = parser.parse_known_args()
    unknown = [name for name in args.pieces if name not in SECONDS]
    if unknown:
        parser.error(f"--pieces has no {', '.join(unknown)}; choose from {', '.join(SECONDS)}")
    return args, passed


def run_piece(name: str, passed: list[str], limit_s: float, folder: Path) -> PieceResult:
    """Run a piece in a process of its own; its output goes to `gpu-report.logs/NAME.log`."""
    if limit_s <= 0:
        return PieceResult(name, 0.0, cause="the time of --limit-s was over; raise it")
    log = folder / "gpu-report.logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    begin, late = time.monotonic(), False
    with tempfile.TemporaryDirectory() as place, log.open("w") as output:
        figures = Path(place) / "figures.json"
        command = [sys.executable, str(HERE / "gpu_pieces.py"), name, "--out", str(figures)]
        process = subprocess.Popen(
            [*command, *passed], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:  # with all that it has started
            end_group(process)
        found = read_figures(figures) if figures.is_file() else ()
    seconds = time.monotonic() - begin
    cause = ""
    if late:
        cause = f"it was not done in {limit_s:.0f} s, see {log}"
    elif process.returncode:
        cause = f"{last_line(log) or f'status {process.returncode}'} (see {log})"
    return PieceResult(name, seconds, found, cause)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a piece's processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def describe() -> Machine:
    """The devices of this machine, and what runs on them."""
    properties = torch.cuda.get_device_properties(0)
    versions = {"torch": torch.__version__}
    for name in ("vllm", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return Machine(
        torch.cuda.get_device_name(0),
        torch.cuda.device_count(),
        properties.total_memory / 2**30,
        versions,
        datetime.now(UTC).strftime("%Y-%m-%d"),
    )


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
