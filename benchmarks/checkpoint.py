"""What saving costs training: stall as a share of step time, and bytes against the least.

`python benchmarks/checkpoint.py --help`. One GRPO run a size, in one process. Its steps come in
blocks that take turns: without saving, with a save beside training after every step (as runs do),
and with a save after every step that training waits for. A stall is the time from the call of
`save` until training continues, the wait for the save before it included. The least that must be
written are the weights and Adam's two moments in float32: 12 bytes a parameter.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training_case import make_trainer, quiet, write_model

from engine.checkpoint import Saver
from engine.console import command_line
from engine.trainers.rl import RLTrainer

SHAPES = {"1M": (144, 4), "10M": (384, 5), "100M": (1152, 6)}  # width and layers
MODES = ("none", "beside training", "waited for")
LEAST = 12  # bytes a parameter


@dataclass(frozen=True)
class Row:
    """Medians of one way of saving at one size."""

    size: str
    parameters: int
    mode: str
    step_s: float
    stall_s: float  # a save
    stall_share: float  # of a step and its stall
    slower: float  # step and stall over a step without saving
    written_bytes: int = 0
    bytes_over_least: float = 0.0


@command_line()
def main() -> None:
    args = parse_args()
    quiet()
    rows: list[Row] = []
    for size in args.sizes:
        rows += measure(size, args)
        if not args.json:
            show(rows[-len(MODES) :], heading=len(rows) == len(MODES))
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))


def measure(size: str, args: argparse.Namespace) -> list[Row]:
    """All ways of saving, block by block, on one trainer."""
    hidden, layers = SHAPES[size]
    steps: dict[str, list[float]] = {mode: [] for mode in MODES}
    stalls: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model = write_model(Path(folder) / "model", hidden, layers)
        total = 1 + len(MODES) * args.blocks * args.steps
        here = {"placement": "local", "threads": args.threads}
        with make_trainer(model, total, args.prompts, args.n, **here) as trainer:
            saver = trainer.make_saver(Path(folder) / "checkpoints")
            trainer.fit(1)
            trainer.save_checkpoint(saver, {})  # the first one allocates what the others reuse
            saver.wait()
            for _ in range(args.blocks):
                for mode in MODES:
                    for _ in range(args.steps):
                        steps[mode].append(timed(functools.partial(trainer.fit, 1)))
                        stalls[mode].append(timed(functools.partial(save_as, mode, trainer, saver)))
                    saver.wait()  # nothing of this block is written during the next
            assert saver.stats is not None
            written = saver.stats.written_bytes
        parameters = count(model)
    plain = statistics.median(steps["none"])
    rows = []
    for mode in MODES:
        step, stall = statistics.median(steps[mode]), statistics.median(stalls[mode])
        rows.append(
            Row(
                size,
                parameters,
                mode,
                step,
                stall,
                stall / (step + stall),
                (step + stall) / plain,
                0 if mode == "none" else written,
                0.0 if mode == "none" else written / (LEAST * parameters),
            )
        )
    return rows


def save_as(mode: str, trainer: RLTrainer, saver: Saver) -> None:
    """What a step of this mode ends with."""
    if mode != "none":
        trainer.save_checkpoint(saver, {})
    if mode == "waited for":
        saver.wait()


def timed(act: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def count(model: Path) -> int:
    """Parameters in a model folder."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", framework="pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def show(rows: list[Row], heading: bool) -> None:
    """Print one size."""
    if heading:
        print(
            f"{'size':>6} {'saves':16} {'step s':>8} {'stall s':>8} {'share':>7} {'slower':>7} "
            f"{'MB':>8} {'/ least':>8}"
        )
    for row in rows:
        print(
            f"{row.size:>6} {row.mode:16} {row.step_s:8.3f} {row.stall_s:8.4f} "
            f"{row.stall_share:7.2%} {row.slower:7.2f} {row.written_bytes / 1e6:8.2f} "
            f"{row.bytes_over_least:8.3f}",
            flush=True,
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What saving costs training.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["1M", "10M"])
    parser.add_argument("--prompts", type=int, default=4, help="a step")
    parser.add_argument("--n", type=int, default=4, help="completions a prompt")
    parser.add_argument("--steps", type=int, default=3, help="in a block")
    parser.add_argument("--blocks", type=int, default=3, help="of each way of saving")
    parser.add_argument("--threads", type=int, default=1, help="of the trainer")
    parser.add_argument("--folder", help="where checkpoints are written; empty: the system's own")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
