"""Metrics that don't depend on how a batch was cut: sums and counts, divided at the very end.

What lives here: means, largest values, and merging those of micro-batches and ranks.
What does not: where metrics are sent (`engine.tracking`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithms.masked import mask_out, masked_sum


@dataclass(frozen=True, slots=True)
class MeanAccumulator:
    """A total and the number of things it was taken over, both scalars without gradient."""

    total: Tensor
    count: Tensor

    def __add__(self, other: MeanAccumulator) -> MeanAccumulator:
        return MeanAccumulator(self.total + other.total, self.count + other.count)

    def mean(self) -> float:
        """total / count; 0 when nothing was counted."""
        count = float(self.count)
        return float(self.total) / count if count else 0.0


class MaxAccumulator(MeanAccumulator):
    """A largest value (`total`), and 1 as its count; 0 where there was none."""

    def __add__(self, other: MeanAccumulator) -> MaxAccumulator:
        count = torch.maximum(self.count, other.count)
        return MaxAccumulator(torch.maximum(self.total, other.total), count)


Metrics = Mapping[str, MeanAccumulator]


def accumulate_mean(x: Tensor, mask: Tensor) -> MeanAccumulator:
    """Sum and count of `x [...]` over the mask, in float64 so that order hardly matters."""
    return MeanAccumulator(masked_sum(x.detach().double(), mask), mask.bool().sum().double())


def accumulate_max(x: Tensor, mask: Tensor) -> MaxAccumulator:
    """The largest of `x [...]` ≥ 0 over the mask."""
    inside = mask_out(mask, x.detach().double())
    return MaxAccumulator(inside.max(), mask.bool().any().double())


def merge(parts: Iterable[Metrics]) -> dict[str, MeanAccumulator]:
    """Add the metrics of micro-batches or ranks; a name that some lack counts where it is."""
    out: dict[str, MeanAccumulator] = {}
    for part in parts:
        for name, value in part.items():
            out[name] = out[name] + value if name in out else value
    return out


def compute_means(metrics: Metrics) -> dict[str, float]:
    """Divide each total by its count."""
    return {name: value.mean() for name, value in metrics.items()}
