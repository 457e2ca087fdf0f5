"""Worker groups: one role on all its ranks, called as if it were one object.

`roles.actor.update(batch)` is spread by the method's dispatch rule and returns a future at once.
Where the ranks live is a subclass's matter: `local_groups` (this process), `ray_groups` (actors).
Both give equal results.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from engine.batch import Batch
from engine.controller.timeline import Recorder, Span
from engine.controller.worker_host import Call, Pieces, Plain, RoleSpec
from engine.errors import PlacementError
from engine.futures import ConcatFuture, Future, LazyBatch
from engine.workers.base import Dispatch, Rule, dispatch_rule
from engine.workers.mesh import Mesh

_numbers = itertools.count(1)


class WorkerGroup(ABC):
    """One role on `world_size` ranks, arranged in `mesh`.

    Any method that the role's class marks with `@dispatch` can be called. Its arguments may be
    futures and LazyBatches; they go to the ranks without being waited for.
    """

    def __init__(self, spec: RoleSpec, world_size: int, recorder: Recorder | None = None) -> None:
        self.role, self.worker_class, self.world_size = spec.name, spec.worker_class, world_size
        self.mesh = spec.mesh or Mesh.of(dp=world_size)
        self.recorder = recorder
        if self.mesh.size != world_size:
            raise PlacementError(
                f"role {spec.name!r} has a mesh of {self.mesh.size} ranks {dict(self.mesh.axes)} "
                f"on a pool of {world_size}; make them equal"
            )

    def __getattr__(self, method: str) -> Callable[..., Future]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._call, method, dispatch_rule(self.worker_class, method))

    def _call(self, method: str, rule: Rule, *arguments: Any, **keywords: Any) -> Future:
        layout: list[Plain | Pieces] = []
        flat: list[Any] = []
        sources: list[Future] = []
        for argument in (*arguments, *keywords.values()):
            if not isinstance(argument, Batch | LazyBatch | Future):
                layout.append(Plain(argument))
                continue
            pieces = _needed(argument, rule) if isinstance(argument, LazyBatch) else [argument]
            runs = [_parts(piece) for piece in pieces]
            sent = [[ref for part in run for ref in self._references(part)] for run in runs]
            layout.append(Pieces(tuple(len(references) for references in sent)))
            flat.extend(reference for references in sent for reference in references)
            sources.extend(p for run in runs for p in run if not isinstance(p, Batch))
        call = Call(
            self.role,
            method,
            tuple(layout),
            tuple(keywords),
            number=next(_numbers),
            step=self.recorder.step if self.recorder else 0,
            after=tuple(getattr(source, "number", 0) for source in sources),
        )
        ranks = range(1 if rule.mode is Dispatch.RANK_ZERO else self.world_size)
        collecting = [
            self.mesh.share(rank, rule.axes).collects if rule.splits else rank == 0
            for rank in ranks
        ]
        future = self._start(call, flat, collecting, sources)
        future.gives = rule.gives
        return future

    @abstractmethod
    def _references(self, piece: Batch | Future) -> list[Any]:
        """What is sent to a host in place of a piece of an argument."""

    @abstractmethod
    def _start(
        self, call: Call, flat: list[Any], collecting: list[bool], sources: Sequence[Future]
    ) -> Future:
        """Start a call on the first `len(collecting)` ranks; those that collect give its value."""


def _needed(batch: LazyBatch, rule: Rule) -> Sequence[Batch | Future]:
    """The pieces that a method reads fields of; those whose fields aren't known are among them."""
    if not rule.reads:
        return batch.pieces
    return [piece for piece in batch.pieces if not (gives := _fields(piece)) or gives & rule.reads]


def _fields(piece: Batch | Future) -> frozenset[str]:
    return frozenset((*piece.names, *piece.columns)) if isinstance(piece, Batch) else piece.gives


def _parts(piece: Batch | Future) -> Sequence[Batch | Future]:
    return piece.parts if isinstance(piece, ConcatFuture) else [piece]


class Roles:
    """All groups of a run as attributes (`roles.actor`, …); a context manager that closes them."""

    def __init__(
        self,
        groups: dict[str, WorkerGroup],
        close: Callable[[], None],
        recorder: Recorder | None = None,
        take_spans: Callable[[], list[Span]] = list,
    ) -> None:
        self._groups, self._close = groups, close
        self.recorder, self._take_spans = recorder, take_spans

    def __getattr__(self, role: str) -> WorkerGroup:
        if role.startswith("_") or role not in self._groups:
            raise AttributeError(f"no role {role!r} in this run; there are {sorted(self._groups)}")
        return self._groups[role]

    def __contains__(self, role: str) -> bool:
        return role in self._groups

    def begin_step(self, step: int) -> None:
        """Say which training step the calls from now on belong to in the timeline."""
        if self.recorder:
            self.recorder.step = step

    def timeline(self) -> list[Span]:
        """Spans of all processes since the last time, by start; none without Placement.timeline.

        Waits for the calls that are under way, so that none is missing. Raises WorkerError when a
        process is dead or gives no answer.
        """
        if self.recorder is None:
            return []
        return sorted(self._take_spans(), key=lambda span: span.start_ns)

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
