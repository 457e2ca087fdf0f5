"""Worker groups: one role on all its ranks, called as if it were one object.

`roles.actor.update(batch)` is spread by the method's dispatch mode and returns a future at once.
Local groups call in this process; those on Ray live in `ray_groups`. Both give equal results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from engine.batch import Batch
from engine.controller.futures import Future, LazyBatch, Ready
from engine.controller.host import Host, Pieces, Plain, RankMetrics
from engine.workers.base import Dispatch, Worker, dispatch_mode


class WorkerGroup(ABC):
    """One role on `world_size` ranks."""

    def __init__(self, role: str, worker_class: type[Worker], world_size: int) -> None:
        self.role, self.worker_class, self.world_size = role, worker_class, world_size

    def __getattr__(self, method: str) -> Callable[..., Future]:
        if method.startswith("_"):
            raise AttributeError(method)
        mode = dispatch_mode(self.worker_class, method)
        return lambda *arguments: self._call(method, mode, arguments)

    @abstractmethod
    def _call(self, method: str, mode: Dispatch, arguments: Sequence[Any]) -> Future:
        """Start `method` on the ranks that `mode` says and return the collected future."""


class LocalGroup(WorkerGroup):
    """A role whose ranks are objects in this process (one rank, in practice)."""

    def __init__(self, role: str, worker_class: type[Worker], hosts: Sequence[Host]) -> None:
        super().__init__(role, worker_class, len(hosts))
        self._hosts = hosts

    def _call(self, method: str, mode: Dispatch, arguments: Sequence[Any]) -> Future:
        hosts = self._hosts[:1] if mode is Dispatch.RANK_ZERO else self._hosts
        layout: list[Plain | Pieces] = []
        flat: list[Batch] = []
        for argument in arguments:
            if isinstance(argument, Batch | LazyBatch | Ready):
                flat.append(_value(argument))
                layout.append(Pieces((1,)))
            else:
                layout.append(Plain(argument))
        results = [host.call(self.role, method, layout, *flat) for host in hosts]
        return Ready(collect(mode, results))


class Roles:
    """All groups of a run as attributes (`roles.actor`, …); a context manager that closes them."""

    def __init__(self, groups: dict[str, WorkerGroup], close: Callable[[], None]) -> None:
        self._groups, self._close = groups, close

    def __getattr__(self, role: str) -> WorkerGroup:
        if role.startswith("_") or role not in self._groups:
            raise AttributeError(f"no role {role!r} in this run; there are {sorted(self._groups)}")
        return self._groups[role]

    def __contains__(self, role: str) -> bool:
        return role in self._groups

    def close(self) -> None:
        """Stop the workers; a second call does nothing."""
        close, self._close = self._close, lambda: None
        close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def collect(mode: Dispatch, results: list[Any]) -> Any:
    """Merge the ranks' results by dispatch mode."""
    if mode is Dispatch.DATA_PARALLEL_METRICS:
        return RankMetrics.mean(results)
    if len(results) == 1 or mode in (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO):
        return results[0]
    return Batch.concat(results)


def _value(argument: Batch | LazyBatch | Ready) -> Batch:
    if isinstance(argument, Batch):
        return argument
    return argument.resolve() if isinstance(argument, LazyBatch) else argument.result()
