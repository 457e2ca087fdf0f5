"""Forks processes that save without pause and kills each at a random moment; see the saver's test.

Moments are counted in saves, however long one takes on this machine: a few whole ones, and a part.

Prints, for each: the step it started from, the last it was told is durable, the step found after
the kill, and whether the kill left something torn.
"""

from __future__ import annotations

import logging
import os
import random
import select
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
from counting import counts, saver, set_all, start

from engine.checkpoint import CheckpointStore, find_latest


def save_for_ever(root: str, keep_last: int, ready: int) -> None:
    """Resume, then save each step; write a byte for each one that is durable."""
    torch.set_num_threads(1)
    with start(size=20_000) as roles:
        store = CheckpointStore(root, keep_last=keep_last)
        saving = saver(store, roles)
        found = store.latest()
        step = 0
        if found is not None:
            step = saving.restore(found)["step"]
            assert counts(roles) == [step, step]
        os.write(ready, b".")
        while True:
            step += 1
            set_all(roles, step)
            saving.save(step, {"step": step})
            last = saving.wait()
            assert last is not None
            assert last.step == step
            os.write(ready, b"+")


DEADLINE_S = 120.0


def one_round(root: str, rng: random.Random, pace: list[float]) -> tuple[int, int, int, int]:
    """One process; `pace` has what the latest saves took, in s."""
    before = find_latest(root)
    start_step = before.step if before else 0
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(root, rng.choice([1, 2]), writing)
        finally:
            os._exit(1)
    os.close(writing)
    told = b""
    whole, part = rng.randrange(5), rng.uniform(0.0, 1.0)
    while len(told) <= whole:  # the first byte says that it has begun
        begin = time.monotonic()
        if not select.select([reading], [], [], DEADLINE_S)[0] or not (now := os.read(reading, 1)):
            raise SystemExit(f"the process that saves gave up after {told!r}")
        if told:
            pace.append(time.monotonic() - begin)
        told += now
    time.sleep(part * statistics.median(pace[-9:]))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WTERMSIG(status) != signal.SIGKILL:
        raise SystemExit("the process that saves had ended by itself")
    while chunk := os.read(reading, 4096):
        told += chunk
    os.close(reading)
    names = os.listdir(root)
    torn = [n for n in names if not (Path(root) / n / "COMPLETE").exists() or n.startswith(".")]
    after = find_latest(root)
    found = after.step if after else 0
    if after is not None:  # whether it loads, and is of one step, is also the next round's start
        assert after.state["step"] == found
    return start_step, start_step + told.count(b"+"), found, int(bool(torn))


def main() -> None:
    logging.disable(logging.WARNING)  # torn checkpoints are what this is about
    root, rounds = sys.argv[1], int(sys.argv[2])
    rng = random.Random(5)  # 15 whole saves in 6 rounds
    pace = [0.05]
    for _ in range(rounds):
        print(*one_round(root, rng, pace), flush=True)
    with start(size=20_000) as roles:
        found = find_latest(root)
        assert found is not None
        saver(CheckpointStore(root), roles).restore(found)
        assert counts(roles) == [found.step, found.step]


if __name__ == "__main__":
    main()
