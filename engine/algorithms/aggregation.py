"""From losses of tokens to one number whose gradient doesn't depend on how the batch was cut.

What lives here: the aggregation modes and their denominators over the global batch.
What does not: any loss. The rule: a denominator is a fact of the GLOBAL batch (all micro-batches
of all data-parallel ranks that make one optimizer step), taken once; each part contributes a
numerator over it. So the parts' losses, and their gradients, add up to the whole's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from engine.algorithms.masked import masked_mean, masked_sum
from engine.errors import ConfigError, DataError

Mode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]
MODES: tuple[str, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over the global batch. After rejection, take them from the edited mask."""

    tokens: float
    """Tokens inside the mask."""
    sequences: float
    """Completions with at least one token inside the mask; fully masked ones don't count."""
    width: float
    """T, the response columns: what `seq-mean-token-sum-norm` divides by without a scale."""

    @staticmethod
    def from_mask(mask: Tensor) -> Denominators:
        """Count over `mask [B, T]` of the whole global batch (or of one rank, then `+`)."""
        inside = mask.bool()
        return Denominators(float(inside.sum()), float(inside.any(1).sum()), float(mask.shape[1]))

    def __add__(self, other: Denominators) -> Denominators:
        """Join the counts of two parts of one global batch (of equal width after padding)."""
        return Denominators(
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            max(self.width, other.width),
        )


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

    token-mean Σℓm/N · token-sum Σℓm · seq-mean-token-sum Σℓm/#seq ·
    seq-mean-token-sum-norm Σℓm/(#seq·T), or over `scale_factor` in place of T (Dr. GRPO) ·
    seq-mean-token-mean Σ_i mean_t(ℓ_i)/#seq.

    Sum the results (and gradients) of all parts. Where a data-parallel wrapper averages gradients
    over ranks, multiply by the number of ranks. An empty mask gives 0 with a zero gradient.
    Raises DataError when the part has tokens and the denominators have none.
    """
    check_mode(mode)
    if mask.shape != loss.shape:
        raise DataError(f"loss {list(loss.shape)} and mask {list(mask.shape)} differ in shape")
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
