"""`make gpu-check`: what has to be seen on a real GPU, the most valuable first, in ten minutes.

Pieces (`gpu_pieces.py`), each in a process of its own with a deadline: the device's ceilings; an
update with its MFU; a GRPO step of ours and of TRL; decoding; HybridActor's switch; 7B's shape as
rank 0 of fsdp 8; vLLM's sleep; QLoRA in 24 GB; memory against the planner's estimate; NCCL; the
health check; and the tests marked gpu. One that fails is reported with its cause, and the others go
on. After each piece `gpu-report.json` and, for the docs, `gpu-report.md` are written.
Exit status: 0; 1 where a piece failed or a figure misses its limit, or without a GPU; 143 after
SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine.console import command_line

HERE = Path(__file__).parent
SECONDS = {  # a piece may take; together it is --limit-s that counts
    "ceilings": 40,
    "update": 90,
    "step": 200,
    "decode": 120,
    "switch": 60,
    "sharded": 60,
    "qlora": 60,
    "sleep": 90,
    "memory": 60,
    "nccl": 60,
    "health": 60,
    "tests": 300,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, and what it is held against."""

    what: str  # e.g. "0.5B native, to rollout"
    value: float
    unit: str  # e.g. "ms"
    limit: str = ""  # e.g. "< 8 ms"; empty: nothing to compare with
    ok: bool = True

    @property
    def text(self) -> str:
        """Value and unit, with three significant digits."""
        shown = f"{self.value:,.0f}" if abs(self.value) >= 100 else f"{self.value:.3g}"
        return f"{shown} {self.unit}".strip()


@dataclass(frozen=True, slots=True)
class PieceResult:
    """How one piece went."""

    name: str  # e.g. "switch"
    seconds: float
    figures: tuple[Figure, ...] = ()
    cause: str = ""  # why it failed; empty: it did not

    @property
    def fault(self) -> str:
        """What is wrong, in one line; empty if nothing is."""
        if self.cause:
            return self.cause
        missed = [f"{f.what}: {f.text} (wanted {f.limit})" for f in self.figures if not f.ok]
        return "; ".join(missed)


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured."""

    device: str  # e.g. "NVIDIA H200"
    count: int
    memory_gib: float  # of one
    versions: dict[str, str] = field(default_factory=dict)  # e.g. {"torch": "2.13.0"}
    date: str = ""

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.count} × {self.device} ({self.memory_gib:.0f} GiB), {versions}"


@command_line()
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
        result = run_piece(name, passed, min(left, args.patience * SECONDS[name]), args.out)
        results.append(result)
        for figure in result.figures:
            mark = "" if figure.ok else f"   MISSED, wanted {figure.limit}"
            say(f"      {figure.what}: {figure.text}{mark}")
        end = f"FAILED: {result.cause}" if result.cause else "done"
        say(f"      {end}, {result.seconds:.0f} s")
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
    parser.add_argument("--patience", type=float, default=1.0, help="times each piece's seconds")
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
    """Run a piece in a process of its own; its output goes to `gpu-report.logs/NAME.log`, and each
    of its figures, when it is known, to `NAME.jsonl` beside that."""
    if limit_s <= 0:
        return PieceResult(name, 0.0, cause="the time of --limit-s was over; raise it")
    log = folder / "gpu-report.logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = log.with_suffix(".jsonl")
    lines.write_text("")
    begin, late = time.monotonic(), False
    with log.open("w") as output:
        command = [sys.executable, str(HERE / "gpu_pieces.py"), name, "--out", str(lines)]
        process = subprocess.Popen(
            [*command, *passed], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:  # with all that it has started
            end_group(process)
    found = tuple(Figure(**json.loads(line)) for line in lines.read_text().splitlines())
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
    for name in ("vllm", "transformers", "liger-kernel", "trl"):
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


def write_report(folder: Path, machine: Machine, results: Sequence[PieceResult]) -> list[Path]:
    """Write `gpu-report.json` and `gpu-report.md`; return their paths."""
    pieces = [asdict(result) | {"ok": not result.fault} for result in results]
    report: dict[str, Any] = {"machine": asdict(machine), "pieces": pieces}
    files = {
        "gpu-report.json": json.dumps(report, indent=2) + "\n",
        "gpu-report.md": "\n".join(markdown(machine, results)) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]


def markdown(machine: Machine, results: Sequence[PieceResult]) -> Iterator[str]:
    """The table's lines, under a heading with the device's name."""
    yield from (f"### {machine.device}", "", f"`make gpu-check` on {machine}, {machine.date}:", "")
    yield from ("| piece | what | value | wanted | |", "| --- | --- | --- | --- | --- |")
    for result in results:
        for figure in result.figures:
            sign = "" if not figure.limit else "ok" if figure.ok else "**missed**"
            yield f"| {result.name} | {figure.what} | {figure.text} | {figure.limit} | {sign} |"
        if result.cause:
            cause = " ".join(result.cause.replace("|", "\\|").split())
            yield f"| {result.name} | {cause} | | | **failed** |"


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
