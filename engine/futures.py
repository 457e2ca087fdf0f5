"""Values that are still being computed, and the batch that is made of them.

A `Future` is what a group's method returns at once. A `LazyBatch` collects batches and futures
with `|=`; it waits only when a field is read. Handing a LazyBatch to another group hands over the
futures themselves, so rows go from worker to worker and not through the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from engine.batch import Batch


@runtime_checkable
class Future(Protocol):
    """One call on a group, under way or done."""

    gives: frozenset[str]  # fields of the batch that it results in; none: unknown

    def result(self) -> Any:
        """Wait (up to the group's deadline) and return the value, or raise WorkerError."""
        ...

    def done(self) -> bool:
        """Whether `result` would answer, or raise, without waiting for work."""
        ...


class Ready:
    """A future whose value is already there."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.gives: frozenset[str] = frozenset()

    def result(self) -> Any:
        return self._value

    def done(self) -> bool:
        return True


class ConcatFuture:
    """The rows of several futures, one after the other, as one future."""

    def __init__(self, parts: Sequence[Future]) -> None:
        self.parts = tuple(parts)
        self.gives = self.parts[0].gives

    def result(self) -> Batch:
        """Wait for all parts."""
        return Batch.concat([part.result() for part in self.parts])

    def done(self) -> bool:
        return all(part.done() for part in self.parts)


class LazyBatch:
    """The union of batches, some of them still being computed.

    >>> batch = LazyBatch(prompts)
    >>> batch |= roles.reference.log_probs(batch)   # returns at once
    >>> batch["ref_log_probs"]                      # waits
    """

    def __init__(self, *pieces: Batch | Future) -> None:
        self.pieces: list[Batch | Future] = list(pieces)
        self._whole: Batch | None = None

    def __or__(self, other: Batch | Future | LazyBatch | dict[str, Tensor]) -> LazyBatch:
        if isinstance(other, LazyBatch):
            return LazyBatch(*self.pieces, *other.pieces)
        if isinstance(other, dict):
            other = Batch(other)
        return LazyBatch(*self.pieces, other)

    def resolve(self) -> Batch:
        """Wait for all pieces and return them as one batch (later pieces win)."""
        if self._whole is None:
            # The pieces stay: a group that gets them later still reads them from where they are.
            self._whole = unite([p if isinstance(p, Batch) else p.result() for p in self.pieces])
        return self._whole

    def __getitem__(self, name: str) -> Tensor:
        return self.resolve()[name]

    def __len__(self) -> int:
        return len(self.resolve())


def unite(pieces: list[Any]) -> Any:
    """Merge batches over the same rows, later ones winning; one value of any kind stays itself."""
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole | piece
    return whole


def late(what: str, timeout_s: float) -> str:
    """The message for a call that passed its deadline."""
    return (
        f"{what} gave no result within {timeout_s:g} s; the worker hangs or the deadline "
        "(trainer.step_timeout_s, trainer.start_timeout_s) is too short"
    )
