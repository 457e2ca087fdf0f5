"""Real torch.distributed ranks on gloo for tests, each run on processes of its own.

`run_ranks(4, function, *arguments)` calls `function(*arguments)` on ranks 0 to 3 of a process group
and returns what each gave. The function must be importable (a test module's top level) and what
goes in and out picklable. A rank that fails or hangs ends the processes, and is named.

Ranks are forked from a process that has imported what they need, and end with the run: each group
that a test makes leaves a thread behind that wakes a hundred times a second.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_LARGEST = 4
# peft, which `engine` loads where there are adapters, takes a rank a second and a half.
_PRELOADED = [
    *("pytest", "hypothesis", "peft"),
    *("engine.workers.actor", "engine.workers.rollout", "tiny_engine"),
]
_context = multiprocessing.get_context("forkserver")
_ranks: list[tuple[Any, Connection]] = []


class RankError(Exception):
    """What went wrong on a rank, with its traceback."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Run `function` on `world_size` (1 to 4) gloo ranks; return their results by rank.

    Raises RankError with every failed rank's traceback, or the ranks that were still at it after
    `timeout_s`.
    """
    assert 1 <= world_size <= _LARGEST
    _start(world_size)
    try:
        with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
            for rank, (_, pipe) in enumerate(_ranks):
                pipe.send(sys.path)  # before what is found by it
                pipe.send((function, arguments, rank, world_size, folder))
            return _collect(timeout_s)
    finally:
        stop_ranks()


def _collect(timeout_s: float) -> list[Any]:
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(_ranks)}
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


def _start(world_size: int) -> None:
    _context.set_forkserver_preload(_PRELOADED)
    for _ in range(world_size):
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _ranks.append((process, ours))


def stop_ranks() -> None:
    """End the processes."""
    for process, pipe in _ranks:
        process.kill()
        process.join(5.0)
        pipe.close()
    _ranks.clear()


atexit.register(stop_ranks)


def _serve(pipe: Connection) -> None:
    os.environ["GOMP_SPINCOUNT"] = "2000"
    with contextlib.suppress(EOFError):
        pipe.send(_receive(pipe))
        pipe.recv()  # until the end comes


def _receive(pipe: Connection) -> tuple[bool, Any]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    sys.path[:] = pipe.recv()
    try:
        function, arguments, rank, world_size, folder = pipe.recv()
    except (ImportError, AttributeError):
        return False, traceback.format_exc()
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        dist.barrier()  # a rank that is done at once would break off others' connecting
        result = function(*arguments)
        dist.destroy_process_group()
        return True, result
    except BaseException:
        return False, traceback.format_exc()
