"""Values that are still being computed, and the batch that is made of them.

A `Future` is what a worker group's method returns at once. A `LazyBatch` collects batches and
futures with `|=`; it waits only when a field is read. A group that gets a LazyBatch gets the
futures themselves, so rows go from worker to worker and not through the controller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Generic, TypeVar

from torch import Tensor

from engine.batch import Batch

R_co = TypeVar("R_co", covariant=True)


class Future(ABC, Generic[R_co]):
    """A value that is being computed, or is there."""

    number = 0  # of the call that computes it, from 1; 0: no call of a group
    fields: frozenset[str] = frozenset()  # of the batch that it results in; empty: unknown

    @abstractmethod
    def result(self, until: float | None = None) -> R_co:
        """Wait (up to the group's deadline) and return the value, or raise WorkerError.

        `until` is an earlier deadline, of `time.monotonic`, that several futures may share.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether `result` would return, or raise, without waiting for work."""

    @abstractmethod
    def failure(self) -> BaseException | None:
        """The error of a call that has failed already; reads no value and waits for none."""


class Ready(Future[R_co]):
    """A future whose value is there already."""

    def __init__(self, value: R_co) -> None:
        self._value = value

    def result(self, until: float | None = None) -> R_co:
        return self._value

    def done(self) -> bool:
        return True

    def failure(self) -> None:
        return None


class ConcatFuture(Future[Batch]):
    """The rows of several futures, one after the other, as one future."""

    def __init__(self, parts: Sequence[Future[Batch]]) -> None:
        self.parts = tuple(parts)
        self.fields = self.parts[0].fields

    def result(self, until: float | None = None) -> Batch:
        """Wait for all parts."""
        return Batch.concat([part.result(until) for part in self.parts])

    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def failure(self) -> BaseException | None:
        return next(filter(None, (part.failure() for part in self.parts)), None)


class LazyBatch:
    """The union of batches, some of them still being computed.

    >>> batch = LazyBatch(prompts)
    >>> batch |= roles.reference.log_probs(batch)   # returns at once
    >>> batch["ref_log_probs"]                      # waits
    """

    def __init__(self, *pieces: Batch | Future[Batch]) -> None:
        self.pieces = list(pieces)
        self._whole: Batch | None = None

    def __or__(self, other: BatchLike | dict[str, Tensor]) -> LazyBatch:
        if isinstance(other, LazyBatch):
            return LazyBatch(*self.pieces, *other.pieces)
        if isinstance(other, dict):
            other = Batch(other)
        return LazyBatch(*self.pieces, other)

    def resolve(self) -> Batch:
        """Wait for all pieces and return them as one batch (later pieces win)."""
        if self._whole is None:
            # The pieces stay: a group that gets them later still reads them from where they are.
            whole = [p if isinstance(p, Batch) else p.result() for p in self.pieces]
            self._whole = reduce(or_, whole)
        return self._whole

    def __getitem__(self, name: str) -> Tensor:
        return self.resolve()[name]

    def __len__(self) -> int:
        return len(self.resolve())


BatchLike = Batch | LazyBatch | Future[Batch]  # what a group takes where its workers get a Batch
