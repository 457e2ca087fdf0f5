"""Completions a second of the RL loop's modes, side by side on the same model and settings.

`python benchmarks/modes.py --help`. Rollout and trainer have one process and `--threads` cores
each. The base is a loop of the same two processes in which each waits for the other: asynchronous
rollout with staleness 0. `sync` beside it is the default loop, both in one process that has all of
the cores in turn. The modes take turns within a repeat; the best repeat of each counts.

Two processes that never waited for each other would be (rollout + update) / max(rollout, update)
times as fast as the base: the bound. The seconds of the update are those of steps that the base
makes with a timeline, before those that are timed; the rest of its best repeat's are rollout's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training_case import make_trainer, quiet, timed_fit, write_model

from engine.console import command_line
from engine.controller.timeline import Span

BASE = "turns (async, staleness 0)"


@command_line()
def main() -> None:
    args = parse_args()
    quiet()
    apart = {"rollout_threads": args.threads, "threads": 2 * args.threads}
    modes: dict[str, dict[str, Any]] = {
        BASE: {"mode": "async", "staleness": 0} | apart,
        "one_step_off": {"mode": "one_step_off"} | apart,
        "async, staleness 1": {"mode": "async", "staleness": 1} | apart,
        "async, staleness 2": {"mode": "async", "staleness": 2} | apart,
        "sync, in one process": {"mode": "sync", "threads": 2 * args.threads},
    }
    best: dict[str, float] = {}
    bound = 1.0
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", args.hidden, args.layers)
        for repeat in range(args.repeats):
            for name, settings in modes.items():
                untimed = args.warm + (args.steps if name == BASE else 0)
                settings = settings | {"timeline_steps": untimed}
                steps = untimed + args.steps
                with make_trainer(model, steps, args.prompts, args.n, **settings) as trainer:
                    seconds = timed_fit(trainer, untimed)
                rate = args.steps * args.prompts * args.n / seconds
                if name == BASE and rate > best.get(name, 0.0):
                    update = update_seconds(trainer.spans, args.warm)
                    bound = seconds / max(update, seconds - update)
                best[name] = max(best.get(name, 0.0), rate)
                print(f"repeat {repeat + 1}: {name}: {rate:.1f} completions/s", flush=True)
    print(f"\n{'mode':28} {'completions/s':>13} {'ratio':>6} {'of the bound':>13}")
    for name, rate in best.items():
        ratio = rate / best[BASE]
        print(f"{name:28} {rate:13.1f} {ratio:6.2f} {ratio / bound:13.2f}")


def update_seconds(spans: Sequence[Span], warm: int) -> float:
    """Seconds in which the policy's process computed, in all steps after the first `warm`."""
    busy = [s for s in spans if s.step > warm and s.process.startswith("actor") and s.rank == 0]
    return sum(span.end_ns - span.start_ns for span in busy) / 1e9


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Completions a second of the RL loop's modes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--hidden", type=int, default=192, help="width of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16, help="a step")
    parser.add_argument("--n", type=int, default=8, help="completions a prompt")
    parser.add_argument("--steps", type=int, default=16, help="timed")
    parser.add_argument("--warm", type=int, default=3, help="steps before, untimed")
    parser.add_argument("--threads", type=int, default=1, help="of rollout, and of the trainer")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
