"""What every role has in common: where it runs, and how its methods are spread over ranks.

A role is a class whose public methods carry `@dispatch(...)`. Roles that share a process (actor,
rollout and reference) meet in the `Host`'s `shared` space, where the actor puts its model; that is
how a rollout engine decodes with the trainer's weights. How calls reach a process is the
controller's matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from engine.batch import Batch
from engine.errors import WorkerError

F = TypeVar("F", bound=Callable[..., Any])


class Dispatch(Enum):
    """How the arguments of one call on a group reach its ranks, and how results come back."""

    ONE_TO_ALL = "one_to_all"  # same arguments to every rank; rank 0's result
    DATA_PARALLEL = "data_parallel"  # batch rows split over ranks; rows concatenated
    DATA_PARALLEL_METRICS = "data_parallel_metrics"  # batch split; dict of floats averaged by rows
    RANK_ZERO = "rank_zero"  # rank 0 alone


def dispatch(mode: Dispatch) -> Callable[[F], F]:
    """Mark a method as callable on a worker group."""

    def mark(method: F) -> F:
        method.dispatch_mode = mode  # type: ignore[attr-defined]
        return method

    return mark


def dispatch_mode(worker_class: type, method: str) -> Dispatch:
    """Return the mode of a method; raise WorkerError for one that a group can't call."""
    mode = getattr(getattr(worker_class, method, None), "dispatch_mode", None)
    if mode is None:
        raise WorkerError(
            f"{worker_class.__name__}.{method} can't be called on a group; mark it with @dispatch"
        )
    return mode


@dataclass
class WorkerContext:
    """Where a role instance runs."""

    role: str  # e.g. "actor"
    rank: int = 0  # e.g. 0
    world_size: int = 1  # ranks of this role, e.g. 4
    shared: dict[str, Any] = field(default_factory=dict)  # objects of all roles in this process


class Worker:
    """Base of all roles."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def close(self) -> None:
        """Free what the role holds; called once at the end."""


def share_of(batch: Batch, rank: int, world_size: int) -> Batch:
    """Rows of `batch` that belong to `rank`: consecutive, lengths differing by one at most."""
    return batch if world_size == 1 else batch.split(world_size)[rank]
