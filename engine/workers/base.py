"""What every role has in common: where it runs, and how its methods are spread over ranks.

A role is a class whose public methods carry `@dispatch(...)`. Roles that share a process (actor,
rollout and reference) meet in the `Host`'s `shared` space, where the actor puts its model; that is
how a rollout engine decodes with the trainer's weights. How calls reach a process is the
controller's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeVar

from engine.errors import WorkerError
from engine.workers.mesh import DATA_AXES, Mesh

F = TypeVar("F", bound=Callable[..., Any])


class Dispatch(Enum):
    """How the arguments of one call on a group reach its ranks, and how results come back."""

    ONE_TO_ALL = "one_to_all"  # same arguments to every rank; rank 0's result
    DATA_PARALLEL = "data_parallel"  # rows split over the mesh's data axes; rows concatenated
    DATA_PARALLEL_METRICS = "data_parallel_metrics"  # rows split; dict of metrics reduced
    AXIS = "axis"  # rows split over the axes that the method names; rows concatenated
    RANK_ZERO = "rank_zero"  # rank 0 alone


@dataclass(frozen=True, slots=True)
class Rule:
    """How one method is dispatched."""

    mode: Dispatch
    axes: tuple[str, ...] = DATA_AXES  # rows are split over these
    unit: int = 1  # rows that stay together, e.g. 2 for pairs
    pad: bool = False  # rows are padded so that every rank gets equally many
    reads: frozenset[str] = frozenset()  # fields of a batch that it needs; none: all
    gives: frozenset[str] = frozenset()  # fields of its result; none: unknown

    @property
    def splits(self) -> bool:
        """Whether ranks get different rows."""
        return self.mode not in (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO)


def dispatch(
    mode: Dispatch,
    *,
    axis: str | tuple[str, ...] = (),
    unit: int = 1,
    pad: bool = False,
    reads: Iterable[str] = (),
    gives: Iterable[str] = (),
) -> Callable[[F], F]:
    """Mark a method as callable on a worker group.

    `axis` names the mesh axes that rows are split over (default: "dp" and "fsdp"). Every
    `unit` rows (2: pairs) go to one rank. With `pad`, every rank gets equally many units, at least
    one: rows are repeated with `response_mask` 0, and what comes out for them is dropped. Without
    it shares differ by one unit at most, and fewer units than ranks is a DataError.

    A method that names the fields it `reads` doesn't wait for pieces of a batch whose methods say
    that they `give` others: so reward, reference and critic run side by side.
    """
    axes = (axis,) if isinstance(axis, str) else axis
    rule = Rule(mode, axes or DATA_AXES, unit, pad, frozenset(reads), frozenset(gives))
    if (axes or pad or unit != 1) and not rule.splits:
        raise WorkerError(f"{mode} splits no rows; leave axis, unit and pad away")
    if mode is Dispatch.AXIS and not axes:
        raise WorkerError('Dispatch.AXIS needs an axis, such as axis="tp"')

    def mark(method: F) -> F:
        method.dispatch_rule = rule  # type: ignore[attr-defined]
        return method

    return mark


def dispatch_rule(worker_class: type, method: str) -> Rule:
    """Return how a method is dispatched; raise WorkerError for one that a group can't call."""
    rule = getattr(getattr(worker_class, method, None), "dispatch_rule", None)
    if rule is None:
        raise WorkerError(
            f"{worker_class.__name__}.{method} can't be called on a group; mark it with @dispatch"
        )
    return rule


@dataclass(frozen=True, slots=True)
class Metric:
    """A measured number that says how it is merged over ranks; a plain float is a row mean.

    >>> {"loss": 0.7, "memory_gb": Metric(3.1, "max"), "entropy": Metric(1.2, weight=tokens)}
    """

    value: float
    reduce: Literal["mean", "sum", "max", "min"] = "mean"
    weight: float | None = None  # of a mean, e.g. the number of tokens; None: the rank's rows


@dataclass
class WorkerContext:
    """Where a role instance runs."""

    role: str  # e.g. "actor"
    rank: int = 0  # e.g. 0
    world_size: int = 1  # ranks of this role, e.g. 4
    shared: dict[str, Any] = field(default_factory=dict)  # objects of all roles in this process
    mesh: Mesh | None = None  # how the ranks are arranged; None: all of them data-parallel
    address: str = ""  # where rank 0 lets the ranks meet, "host:port"; empty for a single rank

    def __post_init__(self) -> None:
        self.mesh = self.mesh or Mesh.of(dp=self.world_size)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place on each axis of the mesh, e.g. {"dp": 1, "tp": 0}."""
        assert self.mesh is not None
        return self.mesh.coordinates(self.rank)


class Worker:
    """Base of all roles."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def close(self) -> None:
        """Free what the role holds; called once at the end."""
