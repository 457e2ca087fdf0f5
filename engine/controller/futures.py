"""Values that are still being computed, and the batch that is made of them.

A `Future` is what a group's method returns at once. A `LazyBatch` collects batches and futures
with `|=`; it waits only when a field is read. Handing a LazyBatch to another group hands over the
futures themselves, so rows go from worker to worker and not through the controller.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from engine.batch import Batch


class Future(Protocol):
    """One call on a group, under way or done."""

    def result(self) -> Any:
        """Wait (up to the group's deadline) and return the value, or raise WorkerError."""
        ...


class Ready:
    """A future whose value is already there: what local groups return."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


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


def unite(pieces: list[Batch]) -> Batch:
    """Merge batches over the same rows, later ones winning."""
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole | piece
    return whole
