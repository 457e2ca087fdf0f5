"""The public table: our speed beside TRL's, transformers' and vLLM's, by kind of machine.

    python benchmarks/table.py                    # measure what this machine lacks, write the page
    python benchmarks/table.py --rows "grpo 1M"   # measure the rows whose name begins so again
    python benchmarks/table.py --render           # write the page from the stored figures

Each row is one command of `vs_trl.py`, `rollout.py` or `time_to_accuracy.py`, which measure both
sides in turns. Figures are kept in `table.json` by kind of machine and written between the marks
of `docs/benchmarks.md`; the learning curves become `docs/learning.png`. All rows take about 40
minutes on 2 cores; leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vs_trl import THEIRS, cpu_info, matrix_unit
from vs_trl_cases import LIMITS, SIZES

from engine.console import command_line

HERE = Path(__file__).parent
STORED = HERE / "table.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
PICTURE = PAGE.with_name("learning.png")
DEADLINE_S = 3600  # of one row


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table and the command behind it."""

    name: str
    what: str
    command: str  # in benchmarks/, without --json


def grpo_row(size: str, mix: str, limit: int) -> Row:
    large = size in ("60M", "135M")
    options = f"--rounds {1 if large or mix == 'tail' else 3}" + " --in-a-row 2" * large
    return Row(
        f"grpo {size} {mix}",
        f"GRPO step, {size}, completions to {limit} tokens",
        f"vs_trl.py --sizes {size} --mixes {mix} {options}",
    )


ROWS = [
    *(grpo_row(size, mix, limit) for size in SIZES for mix, limit in LIMITS.items()),
    *(
        Row(f"sft {size}", f"warm start step, {size}", f"vs_trl.py --tasks sft --sizes {size}")
        for size in ("1M", "10M")
    ),
    *(
        Row(f"{task} 10M", f"{name} step, 10M", f"vs_trl.py --tasks {task} --sizes 10M --rounds 2")
        for task, name in (("dpo", "DPO"), ("reward", "reward model"))
    ),
    Row(
        "rollout 135M",
        "rollout, 135M, one thread, bfloat16",
        "rollout.py --size 135M --dtype bfloat16 --max-new-tokens 128 "
        "--engines native transformers vllm",
    ),
    Row(
        "accuracy",
        "seconds of RL to 90 % greedy pass@1",
        "time_to_accuracy.py --seeds 0,1,2",
    ),
]

Figures = dict[str, Any]  # of a row: `ours` and `theirs` by name, in seconds or tokens a second


@command_line()
def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure the rows of the public table on this machine, and write the page.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rows", default="", metavar="PREFIX", help="rows to measure again")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    args = parser.parse_args()
    rows = [row for row in ROWS if row.name.startswith(args.rows)]
    if not rows:
        parser.error(f"--rows {args.rows!r} is the start of no row: {[row.name for row in ROWS]}")
    stored: dict[str, Figures] = json.loads(STORED.read_text()) if STORED.is_file() else {}
    if not args.render:
        figures = stored.setdefault(machine_kind(), {})
        for row in rows:
            if args.rows or row.name not in figures:
                figures[row.name] = measure(row)
                replace(STORED, json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
    draw_curves(stored)
    replace(PAGE, render(PAGE.read_text(), stored))
    print(f"wrote {PAGE} and {PICTURE}")


def machine_kind() -> str:
    """The kind of machine, as the table names it."""
    cpu = cpu_info()
    name = re.sub(r"\((R|TM)\)", "", cpu.get("model name", "CPU")).replace(" Processor", "")
    unit = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}.get(matrix_unit(), "no bfloat16")
    kind = f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}"
    return f"{name.strip()} ({kind}), {unit}, {os.cpu_count()} cores"


def measure(row: Row) -> Figures:
    """Run a row's command and return its figures, with the day."""
    print(f"{row.name}: python benchmarks/{row.command}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        program, *options = shlex.split(row.command)
        command = [sys.executable, str(HERE / program), *options, "--json", str(path)]
        subprocess.run(command, check=True, timeout=DEADLINE_S)
        content = json.loads(path.read_text())
    read = {"vs_trl.py": of_steps, "rollout.py": of_rollout, "time_to_accuracy.py": of_curves}
    return {"day": datetime.date.today().isoformat()} | read[program](content)


def of_steps(content: Any) -> Figures:
    """Seconds a step: ours, and TRL's faster one."""
    result = content["results"][0]
    steps = result["case"]["steps"]
    seconds = {
        name: statistics.median(turn["seconds"] for turn in turns) / steps
        for name, turns in result["figures"].items()
    }
    return {
        "ours": round(seconds["ours"], 4),
        "theirs": {"TRL": round(min(seconds[name] for name in seconds if name in THEIRS), 4)},
    }


def of_rollout(content: Any) -> Figures:
    """Useful tokens a second of the engines."""
    rates = {name: round(figures["wall"], 1) for name, figures in content["results"].items()}
    return {"ours": rates.pop("native"), "theirs": rates}


def of_curves(content: Any) -> Figures:
    """Seconds to the goal by seed, and the curves."""
    goal = content["goal"]

    def seconds(points: list[tuple[float, float]]) -> float:
        return next(round(second, 2) for second, score in points if score >= goal)

    curves = content["curves"]
    return {
        "ours": [seconds(curves[seed]["ours"]) for seed in curves],
        "theirs": {"TRL": [seconds(curves[seed]["trl fp32"]) for seed in curves]},
        "curves": {
            name: [[(round(s, 2), round(p, 4)) for s, p in curves[seed][key]] for seed in curves]
            for name, key in (("ours", "ours"), ("TRL", "trl fp32"))
        },
    }


def render(page: str, stored: dict[str, Figures]) -> str:
    """The page with the tables of the stored figures between its marks."""
    kinds = list(stored)
    speeds = [f"| | {' | '.join(kinds)} |", "| --- |" + " --- |" * len(kinds)]
    speeds += [
        f"| {row.what} | {' | '.join(cell(stored[kind].get(row.name)) for kind in kinds)} |"
        for row in ROWS
    ]
    commands = ["| row | command |", "| --- | --- |"]
    commands += [f"| {row.what} | `python benchmarks/{row.command}` |" for row in ROWS]
    for name, table in (("speeds", speeds), ("commands", commands)):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        head, _, rest = page.partition(begin)
        if end not in rest:
            sys.exit(f"{PAGE} has no line {begin.strip()!r} with {end!r} after it: put them back")
        page = head + begin + "\n".join(table) + "\n" + rest[rest.index(end) :]
    return page


def cell(figures: Figures | None) -> str:
    """How many times as fast as each other program, and what both took."""
    if figures is None:
        return "–"
    ours, theirs = figures["ours"], figures["theirs"]
    if isinstance(ours, list):
        ratios = [f"{b / a:.1f}" for a, b in zip(ours, theirs["TRL"], strict=True)]
        return f"**{', '.join(ratios)}** ({', '.join(f'{s:.1f}' for s in ours)} s)"
    if "TRL" in theirs:
        return f"**{theirs['TRL'] / ours:.1f}** ({ours:.3g} s, TRL {theirs['TRL']:.3g} s)"
    ratios = [f"**{ours / rate:.1f}** over {name}" for name, rate in theirs.items()]
    return f"{', '.join(ratios)} ({ours:.0f} tokens/s)"


def draw_curves(stored: dict[str, Figures]) -> None:
    """Greedy pass@1 over seconds of training, a panel for each kind of machine that has curves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {
        kind: figures["accuracy"]["curves"]
        for kind, figures in stored.items()
        if "curves" in figures.get("accuracy", {})
    }
    if not panels:
        return
    figure = Figure(figsize=(8, 3.2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (kind, curves) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(len(panels), 1, number)
        for name, colour in (("ours", "tab:blue"), ("TRL", "tab:orange")):
            for seed, points in enumerate(curves[name]):
                seconds, scores = zip(*points, strict=True)
                label = name if seed == 0 else None
                axes.plot(seconds, [100 * s for s in scores], "o-", ms=3, color=colour, label=label)
        axes.axhline(90, color="grey", lw=0.8, ls=":")
        axes.set(title=kind, xlabel="seconds of training", ylabel="greedy pass@1, %")
        axes.legend(loc="lower right")
    part = PICTURE.with_suffix(".part.png")
    figure.savefig(part, dpi=110)
    part.replace(PICTURE)


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
