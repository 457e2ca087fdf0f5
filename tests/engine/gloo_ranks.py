"""Real torch.distributed ranks on gloo for tests, in processes of their own.

`run_ranks(4, function, *arguments)` calls `function(*arguments)` on ranks 0 to 3 of a process group
and returns what each gave. The function must be importable (a test module's top level) and what
goes in and out picklable. A rank that fails or hangs ends the processes, and is named.

Ranks live for one call. They are forked by the fork server of `multiprocessing`, which imports
torch, transformers, peft and the engine once a session, when the first ranks are started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

_LARGEST = 4
_END_S = 10.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["gloo_ranks", "tiny_engine", "peft"])


class RankError(Exception):
    """What went wrong on a rank, with its traceback."""


@dataclass(frozen=True)
class _Rank:
    process: ForkServerProcess
    pipe: Connection


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Run `function` on `world_size` (1 to 4) gloo ranks; return their results by rank.

    Ranks have this process's working directory, module path and environment variables. Raises
    RankError with every failed rank's traceback, or the ranks that were still running after
    `timeout_s`.
    """
    assert 1 <= world_size <= _LARGEST
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder, _started(world_size) as ranks:
        for number, rank in enumerate(ranks):
            rank.pipe.send(dict(os.environ))
            rank.pipe.send((function, arguments, number, world_size, folder))
        results = _collect(ranks, timeout_s)
        for rank in ranks:
            rank.pipe.send("all ranks are done")
        return results


@contextlib.contextmanager
def _started(world_size: int) -> Iterator[list[_Rank]]:
    """Start processes that end with the block."""
    ranks: list[_Rank] = []
    ended_well = False
    try:
        for _ in range(world_size):
            pipe, of_rank = _context.Pipe()
            with of_rank:
                process = _context.Process(target=_serve, args=(of_rank,))
                process.start()
            ranks.append(_Rank(process, pipe))
        yield ranks
        ended_well = True
    finally:
        for rank in ranks:
            if ended_well:
                rank.process.join(_END_S)
            rank.process.kill()
            rank.process.join()
            rank.process.close()
            rank.pipe.close()


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    waiting = {rank.pipe: number for number, rank in enumerate(ranks)}
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while waiting:
        left = deadline - time.monotonic()
        if failures:  # the others may wait for the one that failed
            left = min(left, 5.0)
        ready = wait(list(waiting), timeout=max(0.0, left))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, "the process died"
            (results if ok else failures)[rank] = value
    if failures or waiting:
        texts = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
        if waiting:
            texts.append(f"ranks {sorted(waiting.values())} gave no answer")
        raise RankError("\n".join(texts))
    return [results[rank] for rank in sorted(results)]


def _serve(pipe: Connection) -> None:
    """Run one function, and keep the process group until all ranks are done.

    A rank that ended sooner would break off the connecting of the others.
    """
    faulthandler.enable(file=2)  # where it crashed is in what the test wrote to stderr
    pipe.send(_receive_and_run(pipe))
    pipe.recv()


def _receive_and_run(pipe: Connection) -> tuple[bool, Any]:
    try:
        environment = pipe.recv()
        os.environ.clear()
        os.environ.update(environment)
        function, arguments, rank, world_size, folder = pipe.recv()
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        dist.barrier()  # a rank that is done at once would break off others' connecting
        return True, function(*arguments)
    except BaseException:
        return False, traceback.format_exc()
