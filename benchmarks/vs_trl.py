"""A training step beside TRL's, on the same machine, model, prompts and settings.

    python benchmarks/vs_trl.py --sizes 1M,10M --rounds 3

GRPO: GRPOTrainer against RLTrainer; `--tasks sft,dpo,reward`: SFTTrainer, DPOTrainer and
RewardTrainer against ours, the last two after a check that both give the same losses. TRL gets an
environment of its own on first use (`trl_environment.py`). Each contestant is a process that loads
the model from one saved folder; they take turns, a step each, so that a busy machine slows all of
them alike (`turns.py`). The first `--warm` turns don't count; figures are medians of the others.
How lengths come about is in `vs_trl_cases.py`. Ours runs with default settings unless its name or
`--ours` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from case_folder import Case
from trl_environment import TRL, trl_python
from turns import Contestant
from vs_trl_cases import (
    LIMITS,
    LOSS_STEPS,
    SIZES,
    write_grpo_case,
    write_loss_case,
    write_pairs_case,
    write_sft_case,
)

from engine.console import command_line, quiet

HERE = Path(__file__).parent
STEPS_OF_ROWS = ("sft", "dpo", "reward")  # tasks without a rollout
OURS: dict[str, list[str]] = {  # settings
    "ours": [],
    "ours fp32": ["model.dtype=float32"],
    "ours bf16": ["model.dtype=bfloat16"],
    "ours ray": ["trainer.placement=ray"],  # of GRPO
}
THEIRS = {"trl fp32": "float32", "trl bf16": "bfloat16"}
STEPS = {"1M": 20, "10M": 5, "60M": 2, "135M": 1}  # a turn, but for GRPO
LOSS_TOLERANCE = 1e-5

Figures = dict[str, float]


@command_line()
def main() -> None:
    args = parse_args()
    quiet()
    names = args.contestants
    trl = trl_python() if any(name in THEIRS for name in names) else None
    results = []
    print(machine_and_trl(args.threads), flush=True)
    for task in args.tasks:
        if task in ("dpo", "reward") and trl is not None:
            compare_losses(args, task, trl)
        for size in args.sizes:
            for mix in args.mixes if task == "grpo" else [""]:
                with tempfile.TemporaryDirectory() as folder:
                    case = write_case(args, task, size, mix, Path(folder))
                    figures = compete(args, case, Path(folder), trl)
                results.append({"case": asdict(case), "figures": figures})
                report(case, figures)
                if args.json:
                    save(args, results)
    summary(results)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Seconds of a training step, ours beside TRL's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def names(allowed: list[str]) -> Any:
        def parse(text: str) -> list[str]:
            chosen = [name.strip() for name in text.split(",")]
            if unknown := [name for name in chosen if name not in allowed]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(allowed)}")
            return chosen

        return parse

    every = [*OURS, *THEIRS]
    parser.add_argument("--tasks", type=names(["grpo", *STEPS_OF_ROWS]), default=["grpo"])
    parser.add_argument("--sizes", type=names(list(SIZES)), default=["1M", "10M"])
    parser.add_argument("--mixes", type=names(list(LIMITS)), default=list(LIMITS))
    parser.add_argument(
        "--contestants", type=names(every), default=["ours", *THEIRS], help=", ".join(every)
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed turns of each")
    parser.add_argument("--warm", type=int, default=1, help="turns before them, untimed")
    parser.add_argument(
        "--in-a-row",
        type=int,
        default=1,
        metavar="N",
        help="steps that each takes in a round; the last one counts. 2 or more where a virtual "
        "machine's host takes memory away from a process that waits",
    )
    parser.add_argument("--limit-s", type=float, default=900, help="of a case, after one round")
    parser.add_argument("--prompts", type=int, default=0, help="a step; 0: by size")
    parser.add_argument("--n", type=int, default=8, help="completions a prompt")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="settings")
    parser.add_argument("--trl", nargs="*", default=[], metavar="FIELD=VALUE", help="of its config")
    parser.add_argument("--json", default="", help="also write all turns to this file")
    return parser.parse_args(arguments)


def write_case(args: argparse.Namespace, task: str, size: str, mix: str, folder: Path) -> Case:
    turns = args.warm + args.rounds * args.in_a_row
    if task == "sft":
        return write_sft_case(folder, size, STEPS[size], turns, args.threads)
    if task in ("dpo", "reward"):
        return write_pairs_case(folder, task, size, STEPS[size], turns, args.threads)
    return write_grpo_case(folder, size, mix, args.n, turns, args.threads, args.prompts)


def compete(
    args: argparse.Namespace, case: Case, folder: Path, trl: Path | None
) -> dict[str, list[dict[str, Any]]]:
    """What each contestant measured in its timed turns."""
    timed: dict[str, list[dict[str, Any]]] = {name: [] for name in args.contestants}
    with ExitStack() as stack:
        entered = [
            stack.enter_context(contestant(args, name, case, folder, trl))
            for name in args.contestants
        ]
        begin = time.perf_counter()
        for number in range(args.warm + args.rounds):
            if number > args.warm and time.perf_counter() - begin > args.limit_s:
                break
            for each in entered:
                for _ in range(1 if number < args.warm else args.in_a_row):
                    turn = each.turn()
                if number >= args.warm:
                    timed[each.name].append(turn)
                note = " (warm-up)" if number < args.warm else ""
                seconds = turn["seconds"] / case.steps
                print(f"  {case.name}: {each.name}: {seconds:.3f} s/step{note}", file=sys.stderr)
    return timed


def compare_losses(args: argparse.Namespace, task: str, trl: Path) -> None:
    """Train both on one batch, in float32, and raise SystemExit where losses differ."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        case = write_loss_case(folder, task, args.threads)
        both = [
            stack.enter_context(contestant(args, name, case, folder, trl))
            for name in ("ours fp32", "trl fp32")
        ]
        losses = [[one.turn()["loss"] for one in both] for _ in range(LOSS_STEPS)]
    print(f"\n{task}: losses of {LOSS_STEPS} steps on one batch, float32, ours and TRL's")
    print("  " + ", ".join(f"{ours:.6f} {theirs:.6f}" for ours, theirs in losses))
    most = max(abs(ours - theirs) for ours, theirs in losses)
    print(f"  largest difference {most:.1e}", flush=True)
    if not most <= LOSS_TOLERANCE:
        raise SystemExit(f"{task}: losses differ by {most:.1e}, above {LOSS_TOLERANCE}")


def contestant(
    args: argparse.Namespace, name: str, case: Case, folder: Path, trl: Path | None
) -> Contestant:
    threads = {"OMP_NUM_THREADS": str(case.threads), "TOKENIZERS_PARALLELISM": "false"}
    log = folder / f"{name}.log"
    if name in THEIRS:
        command = [str(trl), str(HERE / "trl_side.py"), str(folder), THEIRS[name], *args.trl]
        return Contestant(name, command, threads | {"PYTHONPATH": ""}, log)
    settings = [
        *([] if name == "ours ray" and case.task in STEPS_OF_ROWS else OURS[name]),
        *args.ours,
    ]
    command = [sys.executable, str(HERE / "our_side.py"), str(folder), *settings]
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    return Contestant(name, command, threads | {"PYTHONPATH": path}, log)


def medians(case: Case, turns: list[dict[str, Any]]) -> Figures:
    """The figures of one contestant, by the step."""
    for turn in turns:
        turn["update_s"] = (
            turn["seconds"] - turn["before_update_s"]
            if "before_update_s" in turn
            else turn.get("actor.update_s", turn["seconds"])
        )
        turn["rest_s"] = turn["seconds"] - turn.get("rollout_s", 0.0) - turn["update_s"]

    def median(name: str) -> float:
        return statistics.median(turn.get(name, 0.0) for turn in turns) / case.steps

    seconds = median("seconds")
    tokens = sum(turn["tokens"] for turn in turns)
    total = sum(turn["seconds"] for turn in turns)
    rows = case.prompts * case.n
    return {
        "s/step": seconds,
        "fastest": min(turn["seconds"] for turn in turns) / case.steps,
        "rollout_s": median("rollout_s"),
        "update_s": median("update_s"),
        "rest_s": median("rest_s"),
        "rows/s": rows / seconds,
        "tokens/s": tokens / total,
        "length": tokens / len(turns) / case.steps / rows,
        "cpu_s": median("cpu_s"),
        "peak_mb": max(turn["peak_mb"] for turn in turns),
    }


def report(case: Case, measured: dict[str, list[dict[str, Any]]]) -> None:
    """Print one case, a line a contestant."""
    figures = {name: medians(case, turns) for name, turns in measured.items()}
    best = min((figures[name]["s/step"] for name in figures if name in THEIRS), default=0.0)
    units = {"grpo": f"prompts × {case.n}", "sft": "rows"}
    what = f"{case.prompts} {units.get(case.task, 'pairs')}"
    print(f"\n{case.name}: {what} a step, {len(next(iter(measured.values())))} turns each")
    print(
        f"{'':<12}{'s/step':>9}{'fastest':>9}{'rollout':>9}{'update':>9}{'rest':>8}"
        f"{'rows/s':>9}{'tokens/s':>10}{'length':>8}{'CPU s':>8}{'peak MB':>9}{'× TRL':>7}"
    )
    for name, f in figures.items():
        ratio = f"{best / f['s/step']:.2f}" if best and name not in THEIRS else ""
        print(
            f"{name:<12}{f['s/step']:>9.3f}{f['fastest']:>9.3f}{f['rollout_s']:>9.3f}"
            f"{f['update_s']:>9.3f}{f['rest_s']:>8.3f}{f['rows/s']:>9.1f}{f['tokens/s']:>10.0f}"
            f"{f['length']:>8.1f}{f['cpu_s']:>8.2f}{f['peak_mb']:>9.0f}{ratio:>7}",
            flush=True,
        )


def summary(results: list[dict[str, Any]]) -> None:
    """Print the ratios of all cases: the better of TRL's two over ours."""
    print("\nSeconds a step, and how many times as fast as TRL's better one")
    for result in results:
        case = Case(**result["case"])
        figures = {name: medians(case, turns) for name, turns in result["figures"].items()}
        theirs = {name: f["s/step"] for name, f in figures.items() if name in THEIRS}
        best = min(theirs, key=lambda name: theirs[name], default="")
        for name, f in figures.items():
            if name not in THEIRS:
                ratio = f"{theirs[best] / f['s/step']:.2f}× {best}" if best else ""
                print(f"{case.name:<18}{name:<12}{f['s/step']:>9.3f}  {ratio}")


def machine(threads: int) -> str:
    """The machine, as far as it matters for speed."""
    name = cpu_info().get("model name", platform.processor())
    return f"{name}, {threads} threads, {matrix_unit() or 'no bf16 unit'}"


def machine_and_trl(threads: int) -> str:
    return f"{machine(threads)}; TRL {TRL}"


def matrix_unit() -> str:
    """The CPU's best instructions for bfloat16 products: amx_bf16, avx512_bf16 or none ("")."""
    flags = cpu_info().get("flags", "").split()
    return next((unit for unit in ("amx_bf16", "avx512_bf16") if unit in flags), "")


def cpu_info() -> dict[str, str]:
    """The last core's lines of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def save(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump({"machine": machine_and_trl(args.threads), "results": results}, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
