"""A Ray of its own for a script that strikes it: forks, and a cluster that ends like a node."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import Any

import psutil
import torch


def forked(work: Any, *arguments: Any) -> tuple[int, int]:
    """Call `work(*arguments, writing)` in a fork; return its process and the pipe's other end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            torch.set_num_threads(1)
            work(*arguments, writing)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writing)
    return child, reading


def hold_cluster(writing: int) -> None:
    """Start a Ray of this process's own, which ends with it."""
    import ray

    context = ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    os.write(writing, context.address_info["gcs_address"].encode() + b"\n")
    while True:
        time.sleep(3600)


class Cluster:
    """A local Ray that is started again where a strike has ended it.

    Ray's node ends itself where its agent takes 15 s to start, as on a busy machine; it is tried
    again, at most `TRIES` times.
    """

    TRIES = 3

    def __init__(self) -> None:
        self.holder = 0

    def start(self) -> None:
        if self.holder:
            return
        os.environ.pop("RAY_ADDRESS", None)
        for _ in range(self.TRIES):
            self.holder, reading = forked(hold_cluster)
            address = os.read(reading, 1000).decode().strip()
            os.close(reading)
            if address:
                os.environ["RAY_ADDRESS"] = address
                return
            self.stop()
        raise SystemExit(f"Ray did not start in {self.TRIES} tries")

    def raylet(self) -> int:
        below = psutil.Process(self.holder).children(recursive=True)
        return next(p.pid for p in below if p.name() == "raylet")

    def stop(self) -> None:
        """End it as a node ends: all its processes at once."""
        if not self.holder:
            return
        below = psutil.Process(self.holder).children(recursive=True)
        for pid in (self.holder, *(p.pid for p in below)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        os.waitpid(self.holder, 0)
        self.holder = 0
