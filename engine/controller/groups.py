"""Worker groups: one role on all its ranks is called as if it were one object."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.batch import Batch, ConcatFuture, Future, LazyBatch, Ready
from engine.controller.timeline import CallCosts, Recorder, Span
from engine.controller.worker_host import BatchArgument, RemoteCall, RoleSpec
from engine.errors import PlacementError, WorkerError
from engine.parallel.layout import Layout
from engine.workers.role import Dispatch, DispatchRule, dispatch_rule

if TYPE_CHECKING:
    from engine.workers.actor import ActorWorker
    from engine.workers.critic import CriticWorker
    from engine.workers.frozen_models import ReferenceWorker, TeacherWorker
    from engine.workers.reward_worker import RewardWorker
    from engine.workers.role import AsGroup
    from engine.workers.rollout_worker import RolloutWorker, StreamRolloutWorker


_call_numbers = itertools.count(1)


class WorkerGroup(ABC):
    """One role on `world_size` ranks.

    Any method that the role's class marks with `@dispatch` can be called. Its arguments may be
    futures and LazyBatches; they go to the ranks without being waited for.
    """

    def __init__(self, spec: RoleSpec, world_size: int, recorder: Recorder | None = None) -> None:
        self.role, self.worker_class, self.world_size = spec.name, spec.worker_class, world_size
        self.layout = spec.layout or Layout(dp=world_size)
        self.recorder, self.call_costs = recorder, CallCosts()
        self._provided: dict[str, tuple[Batch, Future[Batch]]] = {}  # by method
        if self.layout.world_size != world_size:
            raise PlacementError(
                f"role {spec.name!r} has the layout {self.layout} of {self.layout.world_size} "
                f"ranks on a pool of {world_size}; make them equal"
            )

    def __getattr__(self, method: str) -> Callable[..., Future[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._call, method, dispatch_rule(self.worker_class, method))

    def provide_result(self, method: str, batch: Batch, result: Future[Batch]) -> None:
        """Let the next call of `method` with this very `batch` return `result`, computed ahead."""
        self._provided[method] = batch, result

    def _call(
        self, method: str, rule: DispatchRule, *arguments: object, **keywords: object
    ) -> Future[object]:
        provided = self._provided.get(method)
        if provided and any(_is_batch(a, provided[0]) for a in (*arguments, *keywords.values())):
            return self._provided.pop(method)[1]
        sent: list[object] = []
        data: list[object] = []
        sources: list[Future[object]] = []
        for argument in (*arguments, *keywords.values()):
            if not isinstance(argument, Batch | LazyBatch | Future):
                sent.append(argument)
                continue
            pieces = _pieces_read(argument, rule) if isinstance(argument, LazyBatch) else [argument]
            parts = [p.parts if isinstance(p, ConcatFuture) else [p] for p in pieces]
            references = [[ref for part in run for ref in self._references(part)] for run in parts]
            sent.append(BatchArgument(tuple(len(run) for run in references)))
            data.extend(itertools.chain.from_iterable(references))
            sources.extend(part for run in parts for part in run if isinstance(part, Future))
        call = RemoteCall(
            self.role,
            method,
            tuple(sent),
            tuple(keywords),
            number=next(_call_numbers),
            step=self.recorder.step if self.recorder else 0,
            after=tuple(source.number for source in sources),
        )
        count = 1 if rule.mode is Dispatch.RANK_ZERO else self.world_size
        collecting = [rank == 0 for rank in range(count)]
        if rule.splits_rows:
            collecting = [self.layout.data_shard(rank).collects for rank in range(count)]
        future = self._submit(call, data, collecting, sources)
        future.fields = rule.writes
        return future

    @abstractmethod
    def _references(self, piece: Batch | Future[object]) -> Sequence[object]:
        """What is sent to a host in place of a piece of an argument."""

    @abstractmethod
    def _submit(
        self,
        call: RemoteCall,
        data: Sequence[object],
        collecting: list[bool],
        sources: Sequence[Future[object]],
    ) -> Future[object]:
        """Start a call on the first `len(collecting)` ranks; those that collect give its value."""


def seconds_left(timeout_s: float, until: float | None) -> float:
    """How long a call is waited for: `timeout_s`, or less where a shared deadline comes before."""
    return timeout_s if until is None else max(0.0, min(timeout_s, until - time.monotonic()))


def timeout_error(what: str, timeout_s: float) -> WorkerError:
    return WorkerError(
        f"{what} gave no result within {timeout_s:g} s; the worker hangs or the deadline "
        "(trainer.step_timeout_s, trainer.start_timeout_s) is too short"
    )


def _pieces_read(batch: LazyBatch, rule: DispatchRule) -> Sequence[Batch | Future[Batch]]:
    """The pieces that a method reads fields of; those whose fields aren't known are among them."""

    def is_read(piece: Batch | Future[Batch]) -> bool:
        known = (*piece.names, *piece.columns) if isinstance(piece, Batch) else piece.fields
        return not known or not rule.reads.isdisjoint(known)

    return [p for p in batch.pieces if is_read(p)] if rule.reads else batch.pieces


def _is_batch(argument: object, batch: Batch) -> bool:
    """Whether an argument is `batch`, or a LazyBatch with it among its pieces."""
    pieces = argument.pieces if isinstance(argument, LazyBatch) else [argument]
    return any((p.result() if isinstance(p, Ready) else p) is batch for p in pieces)


if TYPE_CHECKING:

    class ActorGroup(ActorWorker, AsGroup): ...

    class CriticGroup(CriticWorker, AsGroup): ...

    class ReferenceGroup(ReferenceWorker, AsGroup): ...

    class RewardGroup(RewardWorker, AsGroup): ...

    class RolloutGroup(RolloutWorker, AsGroup): ...

    class StreamRolloutGroup(StreamRolloutWorker, AsGroup): ...

    class TeacherGroup(TeacherWorker, AsGroup): ...


class Roles(AbstractContextManager["Roles"]):
    """All groups of a run; a context manager that closes them.

    The roles of this project are attributes. To a type checker `roles.actor.update` is
    `ActorWorker.update`, called with batches that may still be computed, and gives a `Future` of
    what that returns; methods without `@dispatch` raise WorkerError. Any role, one that an
    extension adds too, is `roles["name"]`, a `WorkerGroup` whose methods no type checker knows.
    """

    if TYPE_CHECKING:
        actor: ActorGroup
        rollout: RolloutGroup
        sampler: RolloutGroup
        reference: ReferenceGroup
        teacher: TeacherGroup
        reward: RewardGroup
        critic: CriticGroup
    else:

        def __getattr__(self, role: str) -> WorkerGroup:
            if role.startswith("_") or role not in self._groups:
                raise AttributeError(self._missing(role))
            return self._groups[role]

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        close: Callable[[], None],
        recorder: Recorder | None = None,
        take_spans: Callable[[], list[Span]] = list,
    ) -> None:
        self._groups, self._close = dict(groups), close
        self.recorder, self._take_spans = recorder, take_spans

    def __getitem__(self, role: str) -> WorkerGroup:
        if role not in self._groups:
            raise PlacementError(self._missing(role))
        return self._groups[role]

    def stand_in(self, role: str, group: WorkerGroup) -> None:
        """Let `group` answer the calls of a role that this run has no ranks for."""
        self._groups[role] = group

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __contains__(self, role: str) -> bool:
        return role in self._groups

    def begin_step(self, step: int) -> None:
        """Begin a training step: the timeline and `take_costs` have the calls from now on."""
        self.take_costs()  # of validations and checkpoints
        if self.recorder:
            self.recorder.step = step

    def timeline(self) -> list[Span]:
        """Spans of all processes since the last time, once the calls in flight are done."""
        if self.recorder is None:
            return []
        return sorted(self._take_spans(), key=lambda span: span.start_ns)

    def take_costs(self) -> dict[str, float]:
        """What the calls cost that ended since the last time.

        `ROLE.METHOD_s`: seconds of a method's calls, each on its slowest rank, without the wait for
        arguments and earlier calls. `max_memory_allocated_gb` (GiB): the most that PyTorch has had
        on a rank's GPU since the rank started; not there without a GPU.
        """
        groups = [group for group in self._groups.values() if isinstance(group, WorkerGroup)]
        costs = {f"{g.role}.{m}": cost for g in groups for m, cost in g.call_costs.take().items()}
        memory_gb = max((cost.memory_gb for cost in costs.values()), default=0.0)
        return {f"{call}_s": cost.seconds for call, cost in costs.items()} | (
            {"max_memory_allocated_gb": memory_gb} if memory_gb else {}
        )

    def close(self) -> None:
        close, self._close = self._close, lambda: None
        close()

    def _missing(self, role: str) -> str:
        return f"no role {role!r} in this run; there are {sorted(self._groups)}"

    def __exit__(self, *_: object) -> None:
        self.close()
