"""What the controller costs: a step's time beyond the roles' own work, and moving a batch.

`python benchmarks/controller.py --help`. The first figure is from the timeline of a run on Ray at
the default small scale (the default model's shape, 128 prompts × 8 completions): the time of a step
in which no role works, over the time in which one does. The second moves a batch from one worker
to another through the object store, and looks where it lies when it arrives.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from training_case import make_trainer, quiet, write_model

from engine.batch import Batch
from engine.console import command_line
from engine.controller.launch import launch
from engine.controller.placement import Placement, Pool
from engine.controller.timeline import CONTROLLER, Span
from engine.controller.worker_host import RoleSpec
from engine.workers.role import Dispatch, Worker, dispatch


@command_line()
def main() -> None:
    args = parse_args()
    quiet()
    overhead(args)
    transfer(args)


def overhead(args: argparse.Namespace) -> None:
    """Print the share of each step that no role worked in."""
    ends: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", 96, 3)
        steps = args.warm + args.steps
        with make_trainer(
            model, steps, args.prompts, args.n, timeline_steps=steps, placement="ray"
        ) as trainer:
            trainer.on_step = lambda step, total, metrics: ends.append(time.time_ns())
            trainer.fit()
            spans = trainer.spans
    idle = busy = 0.0
    for start, end in list(pairwise(ends))[args.warm - 1 :]:
        work = covered([s for s in spans if s.role != CONTROLLER], start, end)
        busy += work
        idle += end - start - work
    print(
        f"step {(busy + idle) / args.steps / 1e6:.0f} ms, in which roles work "
        f"{busy / args.steps / 1e6:.0f} ms: overhead {100 * idle / busy:.1f} %"
    )


def covered(spans: list[Span], start: int, end: int) -> float:
    """Nanoseconds between `start` and `end` in which at least one span was under way."""
    total, reached = 0, start
    for span in sorted(spans, key=lambda s: s.start_ns):
        low, high = max(span.start_ns, reached), min(span.end_ns, end)
        if high > low:
            total += high - low
            reached = high
    return float(total)


class Maker(Worker):
    """Makes a batch."""

    @dispatch(Dispatch.RANK_ZERO)
    def make(self, mib: int) -> Batch:
        return Batch({"x": torch.ones(64, mib * (1 << 20) // 4 // 64)})


class Taker(Worker):
    """Says where a batch lies."""

    @dispatch(Dispatch.RANK_ZERO)
    def look(self, batch: Batch) -> str:
        address = batch["x"].data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            low, high = (int(number, 16) for number in line.split()[0].split("-"))
            if low <= address < high:
                return "shared memory" if "/dev/shm" in line or "plasma" in line else "own memory"
        return "unknown memory"


def transfer(args: argparse.Namespace) -> None:
    """Print how long a batch takes from worker to worker, and where it ends up."""
    placement = Placement((Pool(("maker",)), Pool(("taker",))))
    with launch(placement, [RoleSpec("maker", Maker), RoleSpec("taker", Taker)]) as roles:
        times = []
        for _ in range(5):
            made = roles.maker.make(args.mib)
            start = time.perf_counter()
            where = roles.taker.look(made).result()
            times.append(time.perf_counter() - start)
    print(f"a batch of {args.mib} MiB, made and moved: {min(times) * 1e3:.0f} ms, read in {where}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What the controller costs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--prompts", type=int, default=128, help="a step")
    parser.add_argument("--n", type=int, default=8, help="completions a prompt")
    parser.add_argument("--steps", type=int, default=5, help="timed")
    parser.add_argument("--warm", type=int, default=2, help="steps before, untimed")
    parser.add_argument("--mib", type=int, default=64, help="size of the batch that is moved")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
