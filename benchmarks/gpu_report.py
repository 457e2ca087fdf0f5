"""What `gpu_check.py` found, as JSON and as a table for the docs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


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
    """What was checked."""

    device: str  # e.g. "NVIDIA H200"
    count: int
    memory_gib: float  # of one
    versions: dict[str, str] = field(default_factory=dict)  # e.g. {"torch": "2.13.0"}
    date: str = ""

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.count} × {self.device} ({self.memory_gib:.0f} GiB), {versions}"


def read_figures(path: Path) -> tuple[Figure, ...]:
    """What a piece wrote by `write_figures`."""
    return tuple(Figure(**values) for values in json.loads(path.read_text()))


def write_figures(path: Path, figures: Iterable[Figure]) -> None:
    path.write_text(json.dumps([asdict(figure) for figure in figures]))


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
            yield f"| {result.name} | {_cell(result.cause)} | | | **failed** |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
