"""Trains in forked processes that are killed at random moments until the run is done.

    python runs_killed_at_random.py MODEL OUT KILLS MODE

Prints a line a process: the step that it resumed from, the last step that it did, whether it was
killed, and whether the kill left a checkpoint torn. The history and the weights are left in OUT.
"""

from __future__ import annotations

import json
import logging
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from tiny_engine import arithmetic_rows

from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.trainers.rl import RLTrainer

STEPS = 24
DEADLINE_S = 120.0


def trainer(folder: str, mode: str) -> RLTrainer:
    settings = {
        "algorithm": {
            "adv_estimator": "gae",
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "target_kl": 0.1, "horizon": 100},
        },
        "actor": {"optim": {"lr": 5e-3}, "ppo_mini_batch_size": 5},
        "critic": {"ppo_mini_batch_size": 5},
        "rollout": {"n": 2},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {
            "mode": mode,
            "total_training_steps": STEPS,
            "train_batch_size": 4,
            "placement": "local",
            "threads": 1,
            "save_freq": 1,
        },
    }
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    return RLTrainer(
        folder, RLConfig.model_validate(settings), loader, max_response_length=4, max_model_len=40
    )


def train(folder: str, out: Path, mode: str, told: Callable[[int], None]) -> None:
    """Do the run, or what is left of it; tell the step it begins at and each one that is done."""
    with trainer(folder, mode) as subject:
        subject.resume(out / "checkpoints")
        told(subject.step)
        subject.on_step = lambda step, total, metrics: told(step)
        subject.fit(None, out / "checkpoints")
        subject.save(out / "model")
        (out / "history.json").write_text(json.dumps(subject.history))


def torn(root: Path) -> bool:
    folders = [path for path in root.iterdir() if path.is_dir()] if root.exists() else []
    return any(not (folder / "COMPLETE").exists() for folder in folders)


def one_process(folder: str, out: Path, mode: str, rng: random.Random, kill: bool) -> bool:
    """Train in a fork, and kill it after some steps if `kill`; whether the run is done."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            train(folder, out, mode, lambda step: os.write(writing, bytes([step])) and None)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    steps = b""
    wanted = 1 + rng.randrange(4) if kill else STEPS + 2
    deadline = time.monotonic() + DEADLINE_S
    while len(steps) < wanted:
        if not select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.kill(child, signal.SIGKILL)
            raise SystemExit(f"no step in {DEADLINE_S:g} s")
        chunk = os.read(reading, 1)
        if not chunk:
            break
        steps += chunk
    if kill:
        time.sleep(rng.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    if not killed and os.WEXITSTATUS(status):
        raise SystemExit("a process that trains has failed")
    os.close(reading)
    print(
        steps[0] if steps else -1,
        steps[-1] if steps else -1,
        int(killed),
        int(torn(out / "checkpoints")),
        flush=True,
    )
    return not killed


def main() -> None:
    logging.disable(logging.WARNING)  # torn checkpoints are what this is about
    folder, out, kills, mode = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(11)
    for round_number in range(kills + 1):
        if one_process(folder, out, mode, rng, kill=round_number < kills):
            return


if __name__ == "__main__":
    main()
