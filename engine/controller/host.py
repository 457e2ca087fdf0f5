"""The process side of a worker group: builds roles, receives calls, merges their arguments.

One `Host` lives in one process (this one, or a Ray actor) and holds one rank of each role placed
there. It imports torch, never Ray.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.batch import Batch
from engine.controller.futures import unite
from engine.workers.base import Dispatch, Worker, WorkerContext, dispatch_mode, share_of


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """How to build one role: its class and keyword arguments, sent to every rank."""

    name: str  # e.g. "actor"
    worker_class: type[Worker]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plain:
    """An argument that is passed on as it is."""

    value: Any


@dataclass(frozen=True, slots=True)
class Pieces:
    """An argument that is a batch made of pieces; piece i consists of `ranks[i]` runs of rows."""

    ranks: tuple[int, ...]  # e.g. (1, 4): one whole piece, one that came from four ranks


class Host:
    """One rank of the roles that share a process."""

    def __init__(
        self, specs: Sequence[RoleSpec], rank: int = 0, world_size: int = 1, threads: int = 0
    ) -> None:
        import torch

        torch.set_num_threads(threads or os.cpu_count() or 1)
        self.rank, self.world_size = rank, world_size
        self.workers: dict[str, Worker] = {}
        shared: dict[str, Any] = {}
        for spec in specs:
            context = WorkerContext(spec.name, rank, world_size, shared)
            self.workers[spec.name] = spec.worker_class(context, **spec.options)

    def call(self, role: str, method: str, layout: Sequence[Plain | Pieces], *flat: Any) -> Any:
        """Run `method` of `role`; `flat` holds the batches that `layout` merges, in order."""
        worker = self.workers[role]
        mode = dispatch_mode(type(worker), method)
        source = iter(flat)
        arguments = []
        for item in layout:
            if isinstance(item, Plain):
                arguments.append(item.value)
                continue
            pieces = [_stack([next(source) for _ in range(ranks)]) for ranks in item.ranks]
            batch = unite(pieces)
            if mode in (Dispatch.DATA_PARALLEL, Dispatch.DATA_PARALLEL_METRICS):
                batch = share_of(batch, self.rank, self.world_size)
            arguments.append(batch)
        return getattr(worker, method)(*arguments)

    def ready(self) -> int:
        """Answer with the rank: the roles are built."""
        return self.rank

    def close(self) -> None:
        """Close the roles, last built first."""
        for worker in reversed(list(self.workers.values())):
            worker.close()


def _stack(parts: list[Batch]) -> Batch:
    return parts[0] if len(parts) == 1 else Batch.concat(parts)
