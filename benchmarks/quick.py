"""`make bench-quick`: ratios to TRL and to transformers.generate against the stored ones.

Fails where a ratio is below the stored one by more than `--noise`, or where an update by the
kernels that this machine has chosen takes longer than by PyTorch's products. `quick.json` has the
ratios by kind of machine (processor family, matrix instructions and cores); on a kind that isn't
there nothing is compared, and `--store` adds it. 3 minutes once TRL's environment is there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import rollout
import roofline
import torch
import vs_trl
from trl_environment import trl_python

from engine.console import command_line, quiet
from engine.kernels import choices

STORED = Path(__file__).with_name("quick.json")


@command_line()
def main() -> None:
    parser = argparse.ArgumentParser(
        description="Ratios against the stored ones; exit status 1 where one is lost.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--noise", type=float, default=0.2, help="share that a ratio may be below")
    parser.add_argument("--store", action="store_true", help="write the ratios of this machine")
    args = parser.parse_args()
    quiet()
    threads = os.cpu_count() or 1
    cpu = vs_trl.cpu_info()
    kind = f"{cpu.get('vendor_id', 'CPU')} family {cpu.get('cpu family', 'unknown')}, "
    kind += f"{vs_trl.matrix_unit() or 'no bf16 unit'}, {threads} cores"
    trl_python()
    begin = time.perf_counter()
    ratios = training_ratios(threads) | rollout_ratios(threads)
    by_library = library_ratios(threads)
    stored = json.loads(STORED.read_text()) if STORED.is_file() else {}
    known: dict[str, float] = stored.get(kind, {})
    lost: list[str] = []
    print(f"\n{kind}; {time.perf_counter() - begin:.0f} s\n{'':<36}{'now':>7}{'stored':>8}")
    for name, ratio in by_library.items():
        print(f"{name:<36}{ratio:>7.2f}{1:>8.2f}")
        if ratio < 1 - args.noise / 2:
            lost.append(f"{name}: {ratio:.2f}, so the chosen kernels are slower than the library")
    for name, ratio in ratios.items():
        before = known.get(name)
        print(f"{name:<36}{ratio:>7.2f}" + (f"{before:>8.2f}" if before else f"{'–':>8}"))
        if before and ratio < before * (1 - args.noise):
            lost.append(f"{name}: {ratio:.2f}, stored {before:.2f}")
    if args.store:
        stored[kind] = {name: round(ratio, 2) for name, ratio in ratios.items()}
        STORED.write_text(json.dumps(stored, indent=2) + "\n")
        print(f"stored in {STORED}")
    elif lost:
        sys.exit("slower than before, beyond noise: " + "; ".join(lost))
    elif not known:
        print(f"no stored ratios for {kind!r}; `python benchmarks/quick.py --store` adds them")


def training_ratios(threads: int) -> dict[str, float]:
    """TRL's seconds a step over ours, on the smallest model."""
    ratios = {}
    theirs = "trl fp32"
    for task, mix, rounds, prompts in (
        ("grpo", "short", 4, 16),
        ("grpo", "tail", 4, 8),
        ("sft", "rows", 3, 0),
    ):
        options = ["--contestants", f"ours,{theirs}", "--sizes", "1M"]
        options += ["--rounds", str(rounds), "--prompts", str(prompts)]
        args = vs_trl.parse_args([*options, "--threads", str(threads)])
        with tempfile.TemporaryDirectory() as folder:
            case = vs_trl.write_case(args, task, "1M", mix, Path(folder))
            turns = vs_trl.compete(args, case, Path(folder), trl_python())
        seconds = {
            name: statistics.median(turn["seconds"] for turn in of) for name, of in turns.items()
        }
        ratios[f"{case.name} / {theirs}"] = seconds[theirs] / seconds["ours"]
    return ratios


def rollout_ratios(threads: int) -> dict[str, float]:
    """The native engine's rate over transformers.generate's, long tail, in bfloat16."""
    torch.set_num_threads(threads)
    ratios = {}
    for size in ("1M", "10M"):
        args = rollout.parse_args(["--size", size, "--dtype", "bfloat16", "--repeats", "2"])
        args.engines, args.threads = ["native", "transformers"], threads
        results = rollout.run(args)
        name = f"rollout {size} bf16 / transformers"
        ratios[name] = results["native"]["wall"] / results["transformers"]["wall"]
    return ratios


def library_ratios(threads: int) -> dict[str, float]:
    """Seconds of an update by PyTorch's products over those by the chosen kernels, in turns."""
    ratios = {}
    for size in ("1M", "10M"):
        args = roofline.parse_args(["--repeats", "2", "--threads", str(threads)])
        seconds: dict[str, float] = {}
        for implementation in ("", "library") * 2:
            os.environ[choices.VARIABLE] = implementation
            turns = roofline.run_ours(args, size, "short", ["model.dtype=bfloat16"])
            least = min(turn["actor.update_s"] for turn in turns)
            seconds[implementation] = min(least, seconds.get(implementation, least))
        del os.environ[choices.VARIABLE]
        ratios[f"update {size} bf16 / by the library"] = seconds["library"] / seconds[""]
    return ratios


if __name__ == "__main__":
    sys.exit(main())
