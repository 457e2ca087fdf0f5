"""The process side of a worker group: builds roles, receives calls, merges their arguments.

One `Host` lives in one process (this one, or a Ray actor) and holds one rank of each role placed
there. It imports torch, never Ray.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from engine.batch import Batch
from engine.controller.row_sharding import RankMetrics, drop_padding, join, shard_rows
from engine.controller.timeline import Recorder, Span
from engine.errors import EngineError, WorkerError
from engine.futures import unite
from engine.plugins import import_plugins
from engine.workers.base import Dispatch, Worker, WorkerContext, dispatch_rule
from engine.workers.mesh import Mesh


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """How to build one role: its class and keyword arguments, sent to every rank."""

    name: str  # e.g. "actor"
    worker_class: type[Worker]
    options: dict[str, Any] = field(default_factory=dict)
    mesh: Mesh | None = None  # e.g. Mesh.of(dp=2, tp=2); None: all ranks data-parallel
    plugins: tuple[str, ...] = ()  # modules imported before the role is built, e.g. ("my_losses",)


@dataclass(frozen=True, slots=True)
class Plain:
    """An argument that is passed on as it is."""

    value: Any


@dataclass(frozen=True, slots=True)
class Pieces:
    """An argument that is a batch made of pieces; piece i consists of `ranks[i]` runs of rows."""

    ranks: tuple[int, ...]  # e.g. (1, 4): one whole piece, one that came from four ranks


@dataclass(frozen=True, slots=True)
class Call:
    """One call on a role, as every one of its ranks gets it (the data itself apart)."""

    role: str
    method: str
    layout: tuple[Plain | Pieces, ...] = ()
    names: tuple[str, ...] = ()  # of the last arguments, which are passed by keyword
    number: int = 0  # counts the run's calls from 1
    step: int = 0  # training step, for the timeline
    after: tuple[int, ...] = ()  # numbers of the calls whose results are arguments


class Host:
    """One rank of the roles that share a process; `build` brings them up.

    What a role raises leaves here as an EngineError: its own, with a note that says role, rank,
    method and traceback, or a WorkerError that says so itself.
    """

    name = "host"  # until it is built: Ray asks for the repr of an actor whose constructor failed

    def __init__(
        self,
        specs: Sequence[RoleSpec],
        rank: int = 0,
        world_size: int = 1,
        threads: int = 0,
        timeline: bool = False,
    ) -> None:
        import torch

        self.threads = threads or os.cpu_count() or 1
        torch.set_num_threads(self.threads)
        self.rank, self.world_size = rank, world_size
        self.specs = {spec.name: spec for spec in specs}
        self.name = f"{'+'.join(self.specs)}/{rank}"
        self.workers: dict[str, Worker] = {}
        self.recorder = Recorder(self.name) if timeline else None

    def __repr__(self) -> str:
        return self.name  # Ray shows it in front of the process's log lines

    def build(self, address: str = "") -> int:
        """Build the roles in order; answer with the process id.

        `address` is where the ranks of this host's pool may form a process group.
        """
        shared: dict[str, Any] = {}
        for spec in self.specs.values():
            context = WorkerContext(
                spec.name, self.rank, self.world_size, shared, spec.mesh, address
            )
            with self._explained(spec.name, "its construction"):
                import_plugins(spec.plugins)
                self.workers[spec.name] = spec.worker_class(context, **spec.options)
        return os.getpid()

    def call(self, call: Call, *flat: Any) -> Any:
        """Run a call; `flat` holds the data that its layout merges, in order.

        Returns None on ranks whose result nobody collects, so that it isn't moved about.
        """
        with self._explained(call.role, call.method), self._recorded(call):
            return self._run(call, iter(flat))

    def call_with_status(self, call: Call, *flat: Any) -> tuple[Any, None]:
        """As `call`, with a second result that tells whether it failed, without the first."""
        return self.call(call, *flat), None

    def _run(self, call: Call, flat: Iterator[Any]) -> Any:
        worker = self.workers[call.role]
        rule = dispatch_rule(type(worker), call.method)
        mesh = self.specs[call.role].mesh or Mesh.of(dp=self.world_size)
        share = mesh.share(self.rank, rule.axes)
        arguments, counts = [], []
        for item in call.layout:
            if isinstance(item, Plain):
                arguments.append(item.value)
                continue
            value = unite([join([next(flat) for _ in range(ranks)]) for ranks in item.ranks])
            if rule.splits and isinstance(value, Batch):
                value, real = shard_rows(value, share, unit=rule.unit, pad=rule.pad)
                counts.append((len(value), real))
            arguments.append(value)
        cut = len(arguments) - len(call.names)
        keywords = dict(zip(call.names, arguments[cut:], strict=True))
        result = getattr(worker, call.method)(*arguments[:cut], **keywords)
        if not (share.collects if rule.splits else self.rank == 0):
            return None
        rows, real = counts[0] if counts else (1, 1)
        if rule.mode is Dispatch.DATA_PARALLEL_METRICS:
            return RankMetrics(real, result)
        return drop_padding(result, rows, real)

    def spans(self) -> list[Span]:
        """The timeline since the last time."""
        return self.recorder.take() if self.recorder else []

    def close(self) -> None:
        """Close the roles, last built first, each of them even where another's close raises."""
        with ExitStack() as stack:
            for worker in self.workers.values():
                stack.callback(worker.close)
        self.workers.clear()

    def _recorded(self, call: Call) -> AbstractContextManager[None]:
        if self.recorder is None:
            return nullcontext()
        return self.recorder.span(
            call.method, call.role, self.rank, call.step, call.number, call.after
        )

    @contextmanager
    def _explained(self, role: str, what: str) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            error.add_note(f"raised in {role} rank {self.rank}: {what}\n{traceback.format_exc()}")
            raise
        except Exception as error:
            raise WorkerError(
                f"{role} rank {self.rank}: {what} failed with {type(error).__name__}: {error}\n"
                f"{traceback.format_exc()}"
            ).with_traceback(error.__traceback__) from error


def rendezvous_address(host: str) -> str:
    """Return "host:port" with a port that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
