"""Trains on Ray in forked drivers, and strikes their processes at random moments until all is done.

    python ray_runs_struck_at_random.py MODEL OUT MODE STRIKES SEED

A strike is SIGKILL or SIGSTOP of a Ray actor, of the node (its raylet) or of the driver. Each run
is resumed until it is done; then the next one begins, until there were STRIKES strikes. STRIKES=0
is one run without any. Prints a line of JSON a strike; each run's weights are left in OUT/model-N.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import secrets
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
from forked_cluster import Cluster, forked
from tiny_engine import arithmetic_rows

from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.trainers.rl import RLTrainer

STEPS = 12
STEP_TIMEOUT_S = float(os.environ.get("STRIKES_STEP_TIMEOUT_S", "15"))  # ours: of a stopped process
SLACK_S = 30.0  # of a busy machine
SILENCE_S = 240.0  # no step, no end: the run hangs
MARK = "HYBRIDFLYTE_STRUCK_RUN"  # in the environment of all that a run starts


@dataclass
class Driver:
    """A forked driver, and what it has told."""

    pid: int
    reading: int
    pids: dict[str, int] = field(default_factory=dict)  # of its Ray actors, by roles
    steps: list[int] = field(default_factory=list)
    error: str = ""
    buffer: bytes = b""

    def listen(self, seconds: float) -> bool:
        """Read what it tells within some time; False once it has ended."""
        if not select.select([self.reading], [], [], max(0.0, seconds))[0]:
            return True
        chunk = os.read(self.reading, 65536)
        *lines, self.buffer = (self.buffer + chunk).split(b"\n")
        for line in lines:
            told = json.loads(line)
            self.pids |= told.get("pids", {})
            self.steps += told.get("steps", [])
            self.error = told.get("error", self.error)
        return bool(chunk)


def trainer(folder: str, mode: str) -> RLTrainer:
    settings: dict[str, Any] = {
        # So that both modes together have a process of each kind.
        "algorithm": {"adv_estimator": "gae" if mode == "sync" else "grpo"},
        "actor": {"optim": {"lr": 5e-3}},
        "rollout": {"n": 2},
        "reward": {"name": "digit_reward:digit_share"},
        "trainer": {
            "mode": mode,
            "total_training_steps": STEPS,
            "train_batch_size": 4,
            "placement": "ray",
            "threads": 2,
            "save_freq": 1,
            "step_timeout_s": STEP_TIMEOUT_S,
        },
    }
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    return RLTrainer(
        folder, RLConfig.model_validate(settings), loader, max_response_length=4, max_model_len=40
    )


def actor_pids() -> dict[str, int]:
    import ray

    found = {}
    for name in ray.util.list_named_actors():
        actor = ray.get_actor(name)
        roles = name.split("/")[1]
        found[roles] = int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60))
    return found


def drive(folder: str, out: Path, mode: str, number: int, writing: int) -> None:
    """Do run `number`, or what is left of it, as a driver of the cluster at RAY_ADDRESS."""

    def tell(**what: Any) -> None:
        os.write(writing, json.dumps(what).encode() + b"\n")

    try:
        with trainer(folder, mode) as subject:
            subject.resume(out / f"checkpoints-{number}")
            tell(pids=actor_pids())
            subject.on_step = lambda step, total, metrics: tell(steps=[step])
            subject.fit(None, out / f"checkpoints-{number}")
            subject.save(out / f"model-{number}")
    except Exception as error:
        traceback.print_exc()
        tell(error=f"{type(error).__name__}: {error}"[:2000])
        raise


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_over(only: str = "") -> list[str]:
    """Command lines of processes of these runs that live, other than this one."""
    found = []
    for process in psutil.process_iter(["pid"]):
        try:
            line = " ".join(process.cmdline())
            ours = process.environ().get(MARK) == os.environ[MARK]
            if ours and process.pid != os.getpid() and only in line and alive(process.pid):
                found.append(f"{process.pid} {line[:80]}")
        except (psutil.Error, OSError):
            continue
    return found


def wait_for(done: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def strike_once(
    folder: str, out: Path, mode: str, number: int, cluster: Cluster, rng: random.Random | None
) -> tuple[bool, dict[str, Any]]:
    """One driver, and one strike if there is `rng`; whether the run is done, and what happened."""
    cluster.start()
    begun = time.monotonic()
    driver = Driver(*forked(drive, folder, out, mode, number))
    going = wait_for_steps(driver, 1 + rng.randrange(3) if rng else STEPS + 1)
    if not going or rng is None:
        return ended(driver), {"error": driver.error, "steps": driver.steps}
    time.sleep(rng.uniform(0.0, 0.3))
    target = rng.choice([*sorted(driver.pids), *sorted(driver.pids), "node", "driver"])
    what = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    pid = {"node": cluster.raylet(), "driver": driver.pid}.get(target) or driver.pids[target]
    try:
        os.kill(pid, what)
    except ProcessLookupError:  # the run had few steps left, and its actors have ended
        return ended(driver), {"error": driver.error, "steps": driver.steps}
    struck = time.monotonic()
    report: dict[str, Any] = {"run": number, "target": target, "signal": what.name}
    if target == "driver" and what is signal.SIGSTOP:
        time.sleep(2.0)
        os.kill(pid, signal.SIGCONT)
    silent = time.monotonic() + SILENCE_S
    while driver.listen(1.0) and time.monotonic() < silent:
        continue
    report["noticed_s"] = round(time.monotonic() - struck, 2)
    # A process that ends closes its files a moment before it is gone.
    report["hung"] = not wait_for(lambda: not alive(driver.pid), 5.0)
    if report["hung"]:
        os.kill(driver.pid, signal.SIGKILL)
    done = ended(driver)
    if target == "node":
        cluster.stop()
    gone = wait_for(lambda: not any(map(alive, driver.pids.values())), SLACK_S)
    guards = wait_for(lambda: not left_over("engine.worker_process"), SLACK_S)
    report |= {"actors": sorted(driver.pids), "steps": driver.steps, "done": done}
    report["error"] = driver.error
    report |= {"orphans": not (gone and guards), "round_s": round(time.monotonic() - begun, 1)}
    return done, report


def wait_for_steps(driver: Driver, wanted: int) -> bool:
    """Wait for a number of steps; False where the driver ended before."""
    silent = time.monotonic() + SILENCE_S
    while len(driver.steps) < wanted:
        before = len(driver.steps)
        if not driver.listen(1.0):
            return False
        if len(driver.steps) > before:
            silent = time.monotonic() + SILENCE_S
        if time.monotonic() > silent:
            os.kill(driver.pid, signal.SIGKILL)
            raise SystemExit(f"no step in {SILENCE_S:g} s")
    return True


def ended(driver: Driver) -> bool:
    """Collect a driver; whether it came to its end."""
    while driver.listen(1.0):
        continue
    os.close(driver.reading)
    _, status = os.waitpid(driver.pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def abandoned(before: set[str]) -> list[str]:
    """What is new in /dev/shm and no process uses: tests beside this one have theirs there too.

    Loky's semaphores are theirs as well: joblib keeps a name after its process, and no run uses it.
    """
    used: set[str] = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            used |= set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
            used |= {Path(os.readlink(file)).name for file in Path(f"/proc/{pid}/fd").iterdir()}
    new = set(os.listdir("/dev/shm")) - before - used
    return sorted(name for name in new if not name.startswith("sem.loky-"))


def main() -> None:
    logging.disable(logging.WARNING)
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints its nodes' logs
    folder, out, mode = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    strikes, seed = int(sys.argv[4]), int(sys.argv[5])
    os.environ[MARK] = f"{os.getpid()}-{seed}"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ |= token | {"RAY_worker_niceness": "0"}  # of drivers and cluster
    out.mkdir(parents=True, exist_ok=True)
    rng, cluster = random.Random(seed), Cluster()
    struck = number = 0
    shm = set(os.listdir("/dev/shm"))
    try:
        while not number or struck < strikes:
            done = False
            while not done:
                with_strike = struck < strikes
                done, report = strike_once(
                    folder, out, mode, number, cluster, rng if with_strike else None
                )
                if "target" in report:
                    struck += 1
                    print(json.dumps(report), file=reports, flush=True)
                elif not done:
                    raise SystemExit(f"a driver that nothing struck failed: {report}")
            number += 1
    finally:
        cluster.stop()
    clean = wait_for(lambda: not left_over(), SLACK_S)
    same = wait_for(lambda: not abandoned(shm), SLACK_S)
    end = {"runs": number, "left": [] if clean else left_over()}
    end["shm"] = [] if same else abandoned(shm)
    print(json.dumps(end), file=reports, flush=True)


if __name__ == "__main__":
    main()
