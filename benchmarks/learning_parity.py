"""What runs of the default task learn in float32 and in reduced dtypes, over several seeds.

    python benchmarks/learning_parity.py --seeds 0,1,2

Each seed has its own rows and initial weights, which all dtypes share. Warm start and RL then run
in one dtype from end to end, with the workflow's default settings. Greedy pass@1 on the 512
held-out problems is compared with the first dtype's, problem by problem.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from pass_at_1 import DEFAULTS, Clock, gain, rate, reinforce, right
from time_to_accuracy import fine_tune, numbers
from transformers.utils import logging as transformers_logging
from vs_trl import machine

from engine.config import RLConfig
from engine.config.text import deep_update
from engine.console import command_line, quiet
from engine.data.sources import load_splits

GAP = ("rollout_corr/k3_kl", "rollout_corr/log_prob_diff_mean", "rollout_corr/log_prob_diff_max")


@command_line()
def main() -> None:
    args = parse_args()
    quiet()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    print(machine(args.threads), flush=True)
    trainer = {"total_training_steps": args.steps, "threads": args.threads}
    config = RLConfig.model_validate(deep_update(DEFAULTS.rl.model_dump(), {"trainer": trainer}))
    for seed in args.seeds:
        splits = load_splits(DEFAULTS.data, seed)
        learned: dict[str, np.ndarray] = {}
        for dtype in args.dtypes:
            begin = Clock.start()
            with tempfile.TemporaryDirectory() as place:
                start, after = Path(place) / "start", Path(place) / "after"
                fine_tune(seed, splits, start, dtype)
                steps = reinforce(start, after, config, splits, seed, dtype=dtype)
                gap = [mean(step[name] for step in steps if name in step) for name in GAP]
                before, learned[dtype] = (right(one, start, splits.test) for one in (start, after))
            gaps = ", ".join(f"{value:.1e}" for value in gap)
            print(
                f"seed {seed}: {dtype}: warm start {rate(before)}, after RL "
                f"{rate(learned[dtype])}; gap of log-probs: k3, mean, max {gaps}; {begin}",
                flush=True,
            )
        first, *others = args.dtypes
        for dtype in others:
            over = gain(learned[first], learned[dtype])
            print(f"seed {seed}: {dtype} over {first}: {over}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Learning in float32 and in reduced dtypes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dtypes", nargs="+", default=["float32", "bfloat16"])
    add("--seeds", type=numbers, default=[0, 1, 2], help="e.g. 0,1,2")
    add("--steps", type=int, default=DEFAULTS.rl.trainer.total_training_steps, help="of RL")
    add("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
