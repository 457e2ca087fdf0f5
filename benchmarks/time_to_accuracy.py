"""Seconds of RL until held-out greedy pass@1 reaches a goal, ours beside TRL's GRPOTrainer.

    python benchmarks/time_to_accuracy.py --seeds 0,1,2

Both begin at the same warm start on the default task: the folder that our SFT stage makes with its
default settings (kept in the cache folder, a minute's work a seed). Ours runs the default RL
settings but, as TRL does, without a KL term and without warm-up; TRL the settings of `--trl-…`
below, the best that were found for it, in float32 or its bf16. They take turns of `--every` steps
(`turns.py`); after each turn the policy is saved, and this process measures greedy pass@1 on the
task's 512 held-out problems, the same way for both. Saving and measuring don't count, loading
neither.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from case_folder import Case, write_case
from pass_at_1 import DEFAULTS, LONGEST, right, solutions
from transformers.utils import logging as transformers_logging
from trl_environment import CACHE, trl_python
from turns import Contestant
from vs_trl import THEIRS, contestant, machine_and_trl

from engine.console import command_line, quiet
from engine.data.sources import Splits, load_splits
from engine.data.templates import encode_prompts
from engine.data.tokenizer import load_tokenizer, train_tokenizer
from engine.models import build_model, save_model
from engine.trainers.offline import SFTTrainer


@dataclass(slots=True)
class Curve:
    """How one contestant came along."""

    seconds: float = 0.0  # of training
    points: list[tuple[float, float]] | None = None  # seconds, pass@1

    def reached(self, goal: float) -> float | None:
        """Seconds until pass@1 was at the goal, None if it wasn't."""
        return next((s for s, score in self.points or () if score >= goal), None)


@command_line()
def main() -> None:
    args = parse_args()
    quiet()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    print(machine_and_trl(args.threads), flush=True)
    results: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for seed in args.seeds:
        splits = load_splits(DEFAULTS.data, seed)
        start = warm_start(seed, splits)
        curves = race(args, seed, start, splits)
        results[seed] = {name: curve.points or [] for name, curve in curves.items()}
        report(args, seed, curves)
        if args.json:
            machine = machine_and_trl(args.threads)
            content = {"machine": machine, "goal": args.goal, "curves": results}
            Path(args.json).write_text(json.dumps(content, indent=1))
    summary(args, results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Seconds of RL until held-out greedy pass@1 reaches a goal.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seeds", type=numbers, default=[0], help="e.g. 0,1,2")
    parser.add_argument("--goal", type=float, default=0.9, help="greedy pass@1")
    parser.add_argument("--contestants", type=str, default="ours,trl fp32")
    parser.add_argument("--every", type=int, default=2, help="steps a turn")
    parser.add_argument("--limit-s", type=float, default=900, help="training seconds of each")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="settings")
    parser.add_argument("--trl", nargs="*", default=[], metavar="FIELD=VALUE", help="of GRPOConfig")
    parser.add_argument("--trl-prompts", type=int, default=128, help="a step")
    parser.add_argument("--trl-lr", type=float, default=5e-4)
    parser.add_argument("--trl-micro-batch", type=int, default=256, help="completions a pass")
    parser.add_argument("--json", default="", help="also write the curves to this file")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def warm_start(seed: int, splits: Splits) -> Path:
    """The folder of the default task's warm start; made once and kept."""
    folder = CACHE / f"warm-start-{seed}"
    if (folder / "config.json").is_file():
        return folder
    print(f"making the warm start of seed {seed} in {folder}", flush=True)
    return fine_tune(seed, splits, folder)


def fine_tune(seed: int, splits: Splits, folder: Path, dtype: str = "auto") -> Path:
    """The default task's warm start as the workflow makes it, written to `folder`."""
    train = splits.sft_train
    questions = [message["content"] for prompt in train["prompt"] for message in prompt]
    tokenizer = train_tokenizer([*questions, *train["response"]], DEFAULTS.data.vocab_size)
    config = DEFAULTS.model.model_copy(update={"dtype": dtype})
    model = build_model(config, tokenizer, seed)
    trainer = SFTTrainer(model, tokenizer.pad_token_id or 0, DEFAULTS.sft, seed=seed)
    trainer.fit(solutions(tokenizer, splits), [])
    return save_model(model, tokenizer, folder)


def race(args: argparse.Namespace, seed: int, start: Path, splits: Splits) -> dict[str, Curve]:
    """Let all contestants train until they are at the goal; return their curves."""
    names = [name.strip() for name in args.contestants.split(",")]
    trl = trl_python() if any(name in THEIRS for name in names) else None
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        before = float(right(start, start, splits.test).mean())
        print(f"seed {seed}: {before:.1%} before", flush=True)
        running: dict[str, tuple[Contestant, Path]] = {}
        for name in names:
            folder = Path(place) / name.replace(" ", "-")
            folder.mkdir()
            (folder / "model").symlink_to(start)
            case = write_accuracy_case(args, seed, folder, splits)
            running[name] = stack.enter_context(contestant(args, name, case, folder, trl)), folder
        curves = {name: Curve(0.0, [(0.0, before)]) for name in names}
        while running:
            for name, (one, folder) in list(running.items()):
                curve = curves[name]
                curve.seconds += one.turn()["seconds"]
                saved = folder / ("trl" if name in THEIRS else "ours")
                score = float(right(saved, start, splits.test).mean())
                assert curve.points is not None
                curve.points.append((curve.seconds, score))
                print(f"  {name}: {curve.seconds:.1f} s, {score:.1%}", file=sys.stderr)
                if score >= args.goal or curve.seconds > args.limit_s:
                    del running[name]
        return curves


def write_accuracy_case(args: argparse.Namespace, seed: int, folder: Path, splits: Splits) -> Case:
    """The default task's prompts, with what a rule checks answers against."""
    rows: list[dict[str, Any]] = [
        {"prompt": list(map(dict, prompt)), "ground_truth": str(rule["ground_truth"])}
        for prompt, rule in zip(splits.train["prompt"], splits.train["reward_model"], strict=True)
    ]
    encoded = encode_prompts(load_tokenizer(folder / "model"), splits.train["prompt"], "train")
    case = Case(
        task="accuracy",
        size="default",
        mix="default",
        prompts=args.trl_prompts,
        n=DEFAULTS.rl.rollout.n,
        max_new_tokens=LONGEST,
        max_prompt=max(map(len, encoded)),
        steps=args.every,
        turns=1000,
        threads=args.threads,
        micro_batch=args.trl_micro_batch,
        lr=args.trl_lr,
        seed=seed,
    )
    return write_case(folder, case, rows)


def report(args: argparse.Namespace, seed: int, curves: dict[str, Curve]) -> None:
    for name, curve in curves.items():
        points = curve.points or []
        reached = curve.reached(args.goal)
        verdict = f"after {reached:.1f} s of training" if reached else "not reached"
        turns = len(points) - 1
        print(
            f"seed {seed}: {name}: {args.goal:.0%} {verdict}, {turns * args.every} steps; "
            f"last {points[-1][1]:.1%} at {points[-1][0]:.1f} s",
            flush=True,
        )


def summary(args: argparse.Namespace, results: dict[int, dict[str, Any]]) -> None:
    """Print the ratio of each seed and their median, ours to TRL's best."""
    ratios = []
    for seed, curves in results.items():
        times = {name: Curve(0.0, points).reached(args.goal) for name, points in curves.items()}
        theirs = [time for name, time in times.items() if time and name in THEIRS]
        ours = [time for name, time in times.items() if time and name not in THEIRS]
        if theirs and ours:
            ratios.append(min(theirs) / min(ours))
            print(
                f"seed {seed}: ours {min(ours):.1f} s, TRL {min(theirs):.1f} s: "
                f"{ratios[-1]:.2f} times as fast"
            )
    if ratios:
        print(f"median of {len(ratios)}: {statistics.median(ratios):.2f} times as fast")


if __name__ == "__main__":
    sys.exit(main())
