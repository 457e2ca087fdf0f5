"""The collectives that the engine uses, over the devices of one machine, and their results.

Each rank is a process with one device. A single device is a group of one, which shows that the
backend loads, meets and computes; bandwidth shows with two or more.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

DEADLINE = timedelta(seconds=60)


def run(ranks: int, backend: str, device: str, megabytes: int) -> dict[str, float]:
    """Seconds of each collective on `megabytes` a rank; raises where a rank does, or is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _rank, (ranks, backend, device, megabytes, Path(folder)), nprocs=ranks
        )
        found: dict[str, float] = json.loads((Path(folder) / "seconds.json").read_text())
    return found


def _rank(rank: int, ranks: int, backend: str, kind: str, megabytes: int, folder: Path) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'meet'}",
        rank=rank,
        world_size=ranks,
        timeout=DEADLINE,
    )
    try:
        found = _collectives(rank, ranks, device, megabytes)
        if rank == 0:
            (folder / "seconds.json").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _collectives(rank: int, ranks: int, device: torch.device, megabytes: int) -> dict[str, float]:
    """Time and check each; every rank's tensor is full of its number plus one."""
    size = max(1, megabytes * 2**20 // 4 // ranks) * ranks
    own = torch.full((size,), rank + 1.0, device=device)
    total = ranks * (ranks + 1) / 2
    shard = torch.empty(size // ranks, device=device)
    gathered = torch.empty(size * ranks, device=device)
    exchanged = torch.empty_like(own)
    received = own.clone()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks

    def ring() -> None:
        if ranks == 1:
            return
        calls = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    def summed() -> Tensor:
        result = own.clone()
        dist.all_reduce(result)
        return result

    def from_first() -> Tensor:
        result = own.clone()
        dist.broadcast(result, 0)
        return result

    def run_all_to_all() -> None:
        dist.all_to_all_single(exchanged, own)

    found = {
        "all_reduce": _timed(summed, device),
        "broadcast": _timed(from_first, device),
        "all_gather": _timed(lambda: dist.all_gather_into_tensor(gathered, own), device),
        "reduce_scatter": _timed(lambda: dist.reduce_scatter_tensor(shard, own), device),
        "all_to_all": _timed(run_all_to_all, device),
        "send and receive": _timed(ring, device),
    }
    parts = torch.arange(1.0, ranks + 1, device=device)
    wrong = {
        "all_reduce": bool((summed() != total).any()),
        "broadcast": bool((from_first() != 1).any()),
        "all_gather": bool((gathered.view(ranks, -1) != parts[:, None]).any()),
        "reduce_scatter": bool((shard != total).any()),
        "all_to_all": bool((exchanged.view(ranks, -1) != parts[:, None]).any()),
        "send and receive": bool((received != before + 1).any()),
    }
    names = [name for name, is_wrong in wrong.items() if is_wrong]
    if names:
        raise RuntimeError(f"rank {rank} got wrong numbers from {', '.join(names)}")
    return found


def _timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the second call."""
    seconds = 0.0
    for _ in range(2):
        dist.barrier()
        _wait(device)
        begin = time.perf_counter()
        call()
        _wait(device)
        seconds = time.perf_counter() - begin
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
