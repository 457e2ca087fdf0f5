"""What every role has in common: where it runs, how its methods are dispatched, and its state."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from types import MethodType
from typing import TYPE_CHECKING, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from engine.batch import Batch, BatchLike, Future
from engine.checkpoint import format as checkpoint_format
from engine.checkpoint.saver import Background
from engine.checkpoint.state_dict import CpuStager, StateDict, process_rng, set_process_rng
from engine.errors import CheckpointError, DamagedCheckpointError, DivergedError, WorkerError
from engine.parallel.layout import Layout, RankGrid
from engine.storage.folder import Folder

if TYPE_CHECKING:
    from engine.runtime.policy_runtime import PolicyRuntime
    from engine.runtime.sharded_model import ShardedModel

W = TypeVar("W")  # the worker
R = TypeVar("R")  # what a method returns
P = ParamSpec("P")  # what it takes on a worker
Q = ParamSpec("Q")  # what it takes on a group


class Dispatch(Enum):
    """How the arguments of one call on a group reach its ranks, and how results come back."""

    ONE_TO_ALL = "one_to_all"  # same arguments to every rank; rank 0's result
    DATA_PARALLEL = "data_parallel"  # rows split over the layout's data axes; rows concatenated
    DATA_PARALLEL_METRICS = "data_parallel_metrics"  # rows split; dict of metrics reduced
    RANK_ZERO = "rank_zero"  # rank 0 alone


@dataclass(frozen=True, slots=True)
class DispatchRule:
    mode: Dispatch
    unit: int = 1  # rows that stay together, e.g. 2 for pairs
    pad: bool = False  # rows are padded so that every rank gets equally many
    reads: frozenset[str] = frozenset()  # fields of a batch that it needs; empty: all
    writes: frozenset[str] = frozenset()  # fields of its result; empty: unknown

    @property
    def splits_rows(self) -> bool:
        return self.mode in (Dispatch.DATA_PARALLEL, Dispatch.DATA_PARALLEL_METRICS)


class AsGroup:
    """Says to the type checker that a worker class stands for its group; never instantiated."""


class RoleMethod(Generic[P, Q, R]):
    """A method that a worker group can call, and the rule by which it is dispatched."""

    def __init__(self, function: Callable[..., R], rule: DispatchRule) -> None:
        self._function, self.rule = function, rule
        self.__doc__, self.__wrapped__ = function.__doc__, function

    @overload
    def __get__(self, worker: None, owner: type) -> RoleMethod[P, Q, R]: ...
    @overload
    def __get__(self, worker: AsGroup, owner: type) -> Callable[Q, Future[R]]: ...
    @overload
    def __get__(self, worker: object, owner: type) -> Callable[P, R]: ...
    def __get__(self, worker: object, owner: type) -> object:
        return self if worker is None else MethodType(self._function, worker)


class RoleMethodDecorator:
    """What `dispatch` returns. A first argument that is a Batch may be lazy on the group."""

    def __init__(self, rule: DispatchRule) -> None:
        self._rule = rule

    @overload
    def __call__(
        self, method: Callable[Concatenate[W, Batch | None, P], R]
    ) -> RoleMethod[Concatenate[Batch | None, P], Concatenate[BatchLike | None, P], R]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[W, Batch, P], R]
    ) -> RoleMethod[Concatenate[Batch, P], Concatenate[BatchLike, P], R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[W, P], R]) -> RoleMethod[P, P, R]: ...
    def __call__(self, method: Callable[..., R]) -> object:
        return RoleMethod(method, self._rule)


def dispatch(
    mode: Dispatch,
    *,
    unit: int = 1,
    pad: bool = False,
    reads: Iterable[str] = (),
    writes: Iterable[str] = (),
) -> RoleMethodDecorator:
    """Mark a method as callable on a worker group.

    Every `unit` rows (2: pairs) go to one rank. With `pad`, every rank gets equally many units, at
    least one: rows are repeated with `response_mask` 0, and what comes out for them is dropped.
    Without it shares differ by one unit at most, and fewer units than ranks is a DataError.

    A method that names the fields it `reads` doesn't wait for pieces of a batch whose methods say
    that they write others (`writes`): so reward, reference and critic run concurrently.
    """
    rule = DispatchRule(mode, unit, pad, frozenset(reads), frozenset(writes))
    if (pad or unit != 1) and not rule.splits_rows:
        raise WorkerError(f"{mode} splits no rows; leave unit and pad out")
    return RoleMethodDecorator(rule)


def dispatch_rule(worker_class: type, method: str) -> DispatchRule:
    """Return how a method is dispatched; raise WorkerError for one that a group can't call."""
    attribute = getattr(worker_class, method, None)
    if not isinstance(attribute, RoleMethod):
        raise WorkerError(
            f"{worker_class.__name__}.{method} can't be called on a group; mark it with @dispatch"
        )
    return attribute.rule


@dataclass(frozen=True, slots=True)
class Metric:
    """A measured number that says how it is merged over ranks; a plain float is a row mean.

    >>> {"loss": 0.7, "memory_gb": Metric(3.1, "max"), "entropy": Metric(1.2, weight=tokens)}
    """

    value: float
    reduce: Literal["mean", "sum", "max", "min"] = "mean"
    weight: float | None = None  # of a mean, e.g. the number of tokens; None: the rank's rows


@dataclass(slots=True)
class ProcessState:
    """What the roles of one process share."""

    policy: PolicyRuntime | None = None  # the actor's, or rollout's own copy
    reference: ShardedModel | None = None
    teachers: list[ShardedModel] = field(default_factory=list)


@dataclass
class WorkerContext:
    role: str  # e.g. "actor"
    rank: int = 0  # e.g. 0
    world_size: int = 1  # ranks of this role, e.g. 4
    process: ProcessState = field(default_factory=ProcessState)  # shared by the process's roles
    layout: RankGrid | None = None  # how ranks share calls; None: all of them data-parallel
    address: str = ""  # where rank 0 lets the ranks meet, "host:port"; empty for a single rank

    def __post_init__(self) -> None:
        self.layout = self.layout or Layout(dp=self.world_size)


class Worker:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def close(self) -> None:
        """Free what the role holds; called once at the end."""


WRITE_TIMEOUT_S = 1800.0  # a rank's whole write


class StatefulWorker(Worker, ABC):
    """A role whose state is saved in checkpoints, with its process's random generators.

    Each first-level entry of its `state_dict` with tensors becomes a file.
    """

    ranks_alike = False  # whether any rank may load any rank's state

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._stager = CpuStager()
        self._name = f"{context.role} rank {context.rank}"
        self._writing = Background(f"{self._name}: writing its state", WRITE_TIMEOUT_S)

    @abstractmethod
    def state_dict(self) -> StateDict:
        """The role's state; tensors may be the live ones."""

    @abstractmethod
    def load_state_dict(self, state: StateDict) -> None:
        """Load a saved state; raise CheckpointError, changing nothing, if it doesn't fit."""

    @dispatch(Dispatch.ONE_TO_ALL)
    def save_state(self, folder: str) -> float:
        """Copy the state, write it in the background, and return the seconds that the copy took.

        Raises CheckpointError if the write before failed, DivergedError for weights not finite.
        """
        begin = time.perf_counter()
        self._writing.wait()
        try:
            values, groups = self._stager.stage(self.state_dict() | {"process_rng": process_rng()})
        except DivergedError as error:
            raise error.with_message(f"{self._name}: {error}") from error

        def write() -> None:
            checkpoint_format.write_state(Folder(folder), self._stem(), values, groups)

        self._writing.start(write)
        return time.perf_counter() - begin

    @dispatch(Dispatch.ONE_TO_ALL)
    def wait_saved(self, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Wait for the write; raise CheckpointError, once, if it failed."""
        self._writing.wait(timeout_s)

    @dispatch(Dispatch.ONE_TO_ALL)
    def load_state(self, folder: str) -> None:
        """Load this rank's state from a complete checkpoint, or change nothing.

        Raises DamagedCheckpointError, and CheckpointError for another model or number of ranks.
        """
        context = self.context
        try:
            saved = self.read_saved(folder)
            own = checkpoint_format.state_of_rank(
                saved, context.rank, context.world_size, any_rank=self.ranks_alike
            )
            self.load_sharded_state(own, saved)
        except DamagedCheckpointError:
            raise
        except CheckpointError as error:
            raise error.with_message(f"{folder}: {self._stem()}: {error}") from error
        set_process_rng(own.get("process_rng"))

    def read_saved(self, folder: str) -> list[checkpoint_format.RankState]:
        """What every rank of this role has saved in a complete checkpoint."""
        return checkpoint_format.read_role_states(folder, self.context.role)

    def load_sharded_state(
        self, own: checkpoint_format.RankState, saved: list[checkpoint_format.RankState]
    ) -> None:
        """Load `own`, one of `saved`; overridden where a rank needs what other ranks wrote."""
        self.load_state_dict(own.state_dict())

    def close(self) -> None:
        self._writing.wait()
        super().close()

    def _stem(self) -> str:
        return checkpoint_format.rank_file_prefix(
            self.context.role, self.context.rank, self.context.world_size
        )
