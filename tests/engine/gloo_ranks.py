"""Real torch.distributed ranks on gloo for tests, in processes of their own.

`run_ranks(4, function, *arguments)` calls `function(*arguments)` on ranks 0 to 3 of a process group
and returns what each gave. The function must be importable (a test module's top level) and what
goes in and out picklable. A rank that fails or hangs ends the processes, and is named.

Ranks are forked from a copy of this process as it was before any test ran, so that they import next
to nothing. They are kept for the next run as long as each run ends well and none of its groups
stays: torch caches what it knows of a group, whose threads wake a hundred times a second.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

_LARGEST = 4


class RankError(Exception):
    """What went wrong on a rank, with its traceback."""


@dataclass(frozen=True)
class _Rank:
    process: int  # a file descriptor of it
    pipe: Connection


_ranks: list[_Rank] = []
_forking: socket.socket | None = None  # to the process that ranks are forked from


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
            for number, rank in enumerate(_ranks[:world_size]):
                rank.pipe.send(sys.path)  # before what is found by it
                rank.pipe.send((function, arguments, number, world_size, folder))
            results = _collect(timeout_s, world_size)
            for rank in _ranks[:world_size]:
                rank.pipe.send(None)
            used = _collect(timeout_s, world_size)
    except BaseException:
        stop_ranks()
        raise
    if any(used):
        stop_ranks()
    return results


def _collect(timeout_s: float, world_size: int) -> list[Any]:
    waiting = {rank.pipe: number for number, rank in enumerate(_ranks[:world_size])}
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


def copy_process() -> None:
    """Keep a copy of this process that ranks are forked from; it ends with this process."""
    global _forking
    if _forking is not None:
        return
    _forking, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            _forking.close()
            _fork_ranks(theirs)
        finally:
            os._exit(1)
    theirs.close()


def _fork_ranks(control: socket.socket) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        asked, pipes, _, _ = socket.recv_fds(control, 1, 1)
        if not asked:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # a rank that has ended
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            control.close()
            _serve(Connection(pipes[0]))
            os._exit(0)
        os.close(pipes[0])
        control.send(pid.to_bytes(4, "little"))


def _start(world_size: int) -> None:
    copy_process()
    assert _forking is not None
    for _ in range(world_size - len(_ranks)):
        ours, theirs = Pipe()
        with theirs:
            socket.send_fds(_forking, [b"+"], [theirs.fileno()])
        pid = int.from_bytes(_forking.recv(4), "little")
        _ranks.append(_Rank(os.pidfd_open(pid), ours))


def stop_ranks() -> None:
    """End the processes."""
    for rank in _ranks:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(rank.process, signal.SIGKILL)
        wait([rank.process], 5.0)
        os.close(rank.process)
        rank.pipe.close()
    _ranks.clear()


atexit.register(stop_ranks)


def _serve(pipe: Connection) -> None:
    faulthandler.enable(file=2)  # where it crashed is in what the test wrote to stderr
    drawn = random.getstate(), torch.get_rng_state()
    with contextlib.suppress(EOFError):
        while True:
            random.setstate(drawn[0])
            torch.set_rng_state(drawn[1])
            pipe.send(_receive(pipe))
            pipe.recv()  # all are done: to end groups sooner would break off others' connecting
            pipe.send(_end_groups())


def _forget_groups() -> bool:
    """Let go of a run's groups and what torch has cached for them; whether one is left."""
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            names.append(file.read())
    return any("gloo" in name for name in names)


def _receive(pipe: Connection) -> tuple[bool, Any]:
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
        return True, function(*arguments)
    except BaseException:
        return False, traceback.format_exc()


def _end_groups() -> tuple[bool, Any]:
    try:
        dist.destroy_process_group()
        return True, _forget_groups()
    except BaseException:
        return False, traceback.format_exc()
