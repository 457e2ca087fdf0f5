"""Metrics that don't depend on how a batch was cut: sums and counts, divided at the very end.

What lives here: `Sum`, merging the metrics of micro-batches and ranks, finishing them.
What does not: where metrics are sent (`engine.tracking`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithms.masked import masked_sum


@dataclass(frozen=True, slots=True)
class Sum:
    """A total and the number of things it was taken over, both scalars without gradient."""

    total: Tensor
    count: Tensor

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total, self.count + other.count)

    def mean(self) -> float:
        """total / count; 0 when nothing was counted."""
        count = float(self.count)
        return float(self.total) / count if count else 0.0


Metrics = Mapping[str, Sum]


def over_mask(x: Tensor, mask: Tensor) -> Sum:
    """Sum of `x [...]` over the mask, in float64 so that order hardly matters."""
    return Sum(masked_sum(x.detach().double(), mask), mask.bool().sum().double())


def merge(parts: Iterable[Metrics]) -> dict[str, Sum]:
    """Add the metrics of micro-batches or ranks; a name that some lack counts where it is."""
    out: dict[str, Sum] = {}
    for part in parts:
        for name, value in part.items():
            out[name] = out[name] + value if name in out else value
    return out


def finish(metrics: Metrics) -> dict[str, float]:
    """Divide each total by its count."""
    return {name: value.mean() for name, value in metrics.items()}


def to_tensor(metrics: Metrics) -> tuple[list[str], Tensor]:
    """Names (sorted) and a `[K, 2]` float64 tensor of totals and counts, for an all-reduce."""
    names = sorted(metrics)
    pairs = [torch.stack([metrics[n].total.double(), metrics[n].count.double()]) for n in names]
    return names, torch.stack(pairs) if pairs else torch.zeros(0, 2, dtype=torch.float64)


def from_tensor(names: Iterable[str], pairs: Tensor) -> dict[str, Sum]:
    """Undo `to_tensor` after the all-reduce."""
    return {name: Sum(pair[0], pair[1]) for name, pair in zip(names, pairs, strict=True)}
