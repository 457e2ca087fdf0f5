"""The process side of a worker group: builds roles, receives calls, merges their arguments.

One `Host` lives in one process (this one, or a Ray actor) and holds one rank of each role placed
there. It imports torch, never Ray.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.batch import Batch
from engine.controller.futures import unite
from engine.errors import EngineError, WorkerError
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
class RankMetrics:
    """What one rank measured on its rows of a batch."""

    rows: int  # e.g. 32
    values: dict[str, float]

    @staticmethod
    def mean(ranks: Sequence[RankMetrics]) -> dict[str, float]:
        """Average over all rows; those of one rank are returned as they are."""
        if len(ranks) == 1:
            return ranks[0].values
        rows = sum(rank.rows for rank in ranks)
        names = ranks[0].values
        return {name: sum(r.values[name] * r.rows for r in ranks) / rows for name in names}


@dataclass(frozen=True, slots=True)
class Pieces:
    """An argument that is a batch made of pieces; piece i consists of `ranks[i]` runs of rows."""

    ranks: tuple[int, ...]  # e.g. (1, 4): one whole piece, one that came from four ranks


class Host:
    """One rank of the roles that share a process; `build` brings them up.

    What a role raises leaves here as an EngineError: its own, or a WorkerError with role, rank,
    method and traceback.
    """

    def __init__(
        self, specs: Sequence[RoleSpec], rank: int = 0, world_size: int = 1, threads: int = 0
    ) -> None:
        import torch

        torch.set_num_threads(threads or os.cpu_count() or 1)
        self.rank, self.world_size = rank, world_size
        self.specs = specs
        self.workers: dict[str, Worker] = {}

    def build(self) -> int:
        """Build the roles in order; answer with the rank."""
        shared: dict[str, Any] = {}
        for spec in self.specs:
            context = WorkerContext(spec.name, self.rank, self.world_size, shared)
            with self._explained(spec.name, "its construction"):
                self.workers[spec.name] = spec.worker_class(context, **spec.options)
        return self.rank

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
        with self._explained(role, method):
            result = getattr(worker, method)(*arguments)
        if mode is Dispatch.DATA_PARALLEL_METRICS:
            rows = next((len(a) for a in arguments if isinstance(a, Batch)), 1)
            return RankMetrics(rows, result)
        return result

    def close(self) -> None:
        """Close the roles, last built first, each of them even where another's close raises."""
        with ExitStack() as stack:
            for worker in self.workers.values():
                stack.callback(worker.close)
        self.workers.clear()

    @contextmanager
    def _explained(self, role: str, what: str) -> Iterator[None]:
        try:
            yield
        except EngineError:
            raise
        except Exception as error:
            raise WorkerError(
                f"{role} rank {self.rank}: {what} failed with {type(error).__name__}: {error}\n"
                f"{traceback.format_exc()}"
            ) from error


def _stack(parts: list[Batch]) -> Batch:
    return parts[0] if len(parts) == 1 else Batch.concat(parts)
