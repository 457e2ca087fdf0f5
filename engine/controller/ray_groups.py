"""Worker groups on Ray: one actor a rank, futures over the object store, deadlines everywhere.

Results stay in the object store until somebody reads them: a future handed to another group goes
there as an object reference. Placement (which actors, where) is in `launch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from engine.batch import Batch
from engine.controller.futures import LazyBatch
from engine.controller.groups import WorkerGroup, collect
from engine.controller.host import Pieces, Plain
from engine.errors import EngineError, WorkerError
from engine.workers.base import Dispatch, Worker


class RayFuture:
    """One call on the ranks of a role; `refs[i]` is rank i's result in the object store."""

    def __init__(
        self, refs: list[Any], mode: Dispatch, role: str, method: str, timeout_s: float
    ) -> None:
        self.refs, self.mode = refs, mode
        self._where, self._timeout_s = f"{role}.{method}", timeout_s
        self._values: list[Any] | None = None

    def result(self) -> Any:
        """Wait for all ranks; raise WorkerError with role, method, and the remote traceback."""
        if self._values is None:
            self._values = [collect(self.mode, get(self.refs, self._where, self._timeout_s))]
        return self._values[0]


class RayGroup(WorkerGroup):
    """A role whose ranks are Ray actors."""

    def __init__(
        self, role: str, worker_class: type[Worker], actors: Sequence[Any], timeout_s: float
    ) -> None:
        super().__init__(role, worker_class, len(actors))
        self._actors, self._timeout_s = list(actors), timeout_s

    def _call(self, method: str, mode: Dispatch, arguments: Sequence[Any]) -> RayFuture:
        actors = self._actors[:1] if mode is Dispatch.RANK_ZERO else self._actors
        layout: list[Plain | Pieces] = []
        flat: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Batch | LazyBatch | RayFuture):
                runs = [_references(piece) for piece in _pieces(argument)]
                layout.append(Pieces(tuple(len(run) for run in runs)))
                flat.extend(ref for run in runs for ref in run)
            else:
                layout.append(Plain(argument))
        refs = [actor.call.remote(self.role, method, layout, *flat) for actor in actors]
        return RayFuture(refs, mode, self.role, method, self._timeout_s)


def get(refs: Sequence[Any], where: str, timeout_s: float) -> list[Any]:
    """`ray.get` with a deadline whose failures are ours: WorkerError, or the remote EngineError."""
    try:
        return ray.get(list(refs), timeout=timeout_s)
    except GetTimeoutError:
        raise WorkerError(
            f"{where} gave no result within {timeout_s:.0f} s; the worker hangs or the deadline "
            "(trainer.step_timeout_s, trainer.start_timeout_s) is too short"
        ) from None
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, EngineError):
            raise cause from None
        raise WorkerError(f"{where} failed with {type(cause).__name__}: {error}") from None
    except RayActorError as error:
        raise WorkerError(f"{where}: the worker process died: {error}") from None
    except RayError as error:
        raise WorkerError(f"{where} failed in Ray, {type(error).__name__}: {error}") from None


def _pieces(argument: Batch | LazyBatch | RayFuture) -> list[Any]:
    return argument.pieces if isinstance(argument, LazyBatch) else [argument]


def _references(piece: Batch | RayFuture) -> list[Any]:
    return piece.refs if isinstance(piece, RayFuture) else [ray.put(piece)]
