"""Losses of tokens become one number, and metrics become sums and counts, however the batch is cut.

A denominator is a fact of the GLOBAL batch (all micro-batches of all data-parallel ranks that make
one optimizer step), taken once; each part contributes a numerator over it. So the parts' losses,
gradients and metrics add up to the whole's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithms import checks
from engine.algorithms.masked import mask_out, masked_mean, masked_sum
from engine.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class MeanAccumulator:
    """A total and the number of things it was taken over, both scalars without gradient."""

    total: Tensor
    count: Tensor

    def __add__(self, other: MeanAccumulator) -> MeanAccumulator:
        return MeanAccumulator(self.total + other.total, self.count + other.count)

    def mean(self) -> float:
        """Return total / count; 0 when nothing was counted."""
        count = float(self.count)
        return float(self.total) / count if count else 0.0


class MaxAccumulator(MeanAccumulator):
    """A largest value (`total`), with count 1; 0 where nothing was counted."""

    def __add__(self, other: MeanAccumulator) -> MaxAccumulator:
        count = torch.maximum(self.count, other.count)
        return MaxAccumulator(torch.maximum(self.total, other.total), count)


Metrics = Mapping[str, MeanAccumulator]


def accumulate_mean(x: Tensor, mask: Tensor) -> MeanAccumulator:
    """Return sum and count of `x [...]` over the mask, in float64 so that order hardly matters."""
    return MeanAccumulator(masked_sum(x.detach().double(), mask), mask.bool().sum().double())


def accumulate_max(x: Tensor, mask: Tensor) -> MaxAccumulator:
    """Return the largest of `x [...]` ≥ 0 over the mask."""
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
    return {name: value.mean() for name, value in metrics.items()}


MODES = (
    *("token-mean", "token-sum"),
    *("seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"),
)


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over the global batch. After rejection, take them from the edited mask."""

    tokens: float  # inside the mask
    sequences: float  # completions with at least one token inside the mask
    width: float  # T, the response columns: what `seq-mean-token-sum-norm` has without a scale

    @staticmethod
    def from_mask(mask: Tensor) -> Denominators:
        """Count over `mask [B, T]` of the whole global batch (or of one rank, then `+`)."""
        inside = mask.bool()
        return Denominators(float(inside.sum()), float(inside.any(1).sum()), float(mask.shape[1]))

    def __add__(self, other: Denominators) -> Denominators:
        """Join the counts of two parts of one global batch (of equal width after padding)."""
        tokens, sequences = self.tokens + other.tokens, self.sequences + other.sequences
        return Denominators(tokens, sequences, max(self.width, other.width))


def check_mode(mode: str) -> None:
    """Raise ConfigError when `mode` is not an aggregation mode."""
    if mode not in MODES:
        raise ConfigError(f"loss_agg_mode={mode!r} is unknown; use one of {', '.join(MODES)}")


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    denominators: Denominators,
    *,
    scale_factor: float | None = None,
) -> Tensor:
    """Reduce `loss [B, T]` of one micro-batch to its share of the global loss (scalar).

    token-mean Σℓm/N · token-sum Σℓm · seq-mean-token-sum Σℓm/#seq · seq-mean-token-sum-norm
    Σℓm/(#seq·T) with `scale_factor` in place of T (Dr. GRPO) · seq-mean-token-mean Σ_i
    mean_t(ℓ_i)/#seq.

    Sum the results (and gradients) of all parts; where a wrapper averages gradients over ranks,
    multiply by their number. An empty mask gives 0 with a zero gradient. Raises DataError when the
    part has tokens and the denominators have none.
    """
    check_mode(mode)
    checks.same_shape(loss=loss, mask=mask)
    if scale_factor is not None and scale_factor <= 0:
        raise ConfigError(f"loss_scale_factor={scale_factor} must be above 0")
    if denominators.tokens == 0 and bool(mask.bool().any()):
        raise DataError(
            "the denominators count no tokens but the mask has some; take them from the mask of "
            "the whole global batch with Denominators.from_mask"
        )
    # A global batch without tokens has a numerator of 0, to which any divisor will do.
    tokens, sequences = max(denominators.tokens, 1.0), max(denominators.sequences, 1.0)
    divisor = {
        "token-mean": tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": sequences,
        "seq-mean-token-sum-norm": sequences * (scale_factor or max(denominators.width, 1.0)),
        "seq-mean-token-mean": sequences,
    }[mode]
    if mode == "seq-mean-token-mean":
        return masked_mean(loss, mask, 1).sum() / divisor
    return masked_sum(loss, mask) / divisor
