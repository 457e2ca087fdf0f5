"""Which tokens or completions of a rollout are too far off-policy to learn from.

What lives here: criteria, their thresholds, and the mask they leave. What does not: weights
(`algorithms.correction`). Rejection edits response_mask; denominators must use the edited mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithms.masked import mask_out, masked_mean, masked_sum
from engine.errors import ConfigError

LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda gap: -gap,
    "k2": lambda gap: 0.5 * gap.square(),
    "k3": lambda gap: torch.expm1(gap) - gap,
}
CRITERIA: tuple[str, ...] = tuple(f"{level}_{kind}" for level in LEVELS for kind in _ESTIMATORS)


@dataclass(frozen=True, slots=True)
class Criterion:
    """Keep where `low ≤ statistic ≤ high`; the statistic is an estimate of KL(rollout ‖ old)."""

    level: str
    kind: str
    low: float
    high: float

    @property
    def name(self) -> str:
        """E.g. `seq_mean_k1`."""
        return f"{self.level}_{self.kind}"

    def kept(self, gap: Tensor, mask: Tensor) -> Tensor:
        """Tokens `[B, T]` (bool) to keep, of the log-ratio L = log π_old − log π_rollout."""
        statistic = _ESTIMATORS[self.kind](mask_out(mask, gap).clamp(-20.0, 20.0))
        if self.level == "token":
            return self._inside(statistic)
        if self.level == "seq_max":
            row = (self._inside(statistic) | ~mask.bool()).all(1)
        else:
            reduce = masked_sum if self.level == "seq_sum" else masked_mean
            row = self._inside(reduce(statistic, mask, 1))
        return row[:, None].expand(mask.shape)

    def _inside(self, statistic: Tensor) -> Tensor:
        return (statistic >= self.low) & (statistic <= self.high)


def parse_criteria(
    rollout_rs: str, rollout_rs_threshold: str | float | None
) -> tuple[Criterion, ...]:
    """Criteria from verl's two settings, e.g. `("token_k1,seq_mean_k3", "0.5_2.0,0.01")`.

    k1 takes bounds `low_high` on π_rollout/π_old (one number c means 1/c to c); k2 and k3 take
    an upper bound. One threshold serves all criteria. `seq_max_*` rejects a completion for any
    token outside. Raises ConfigError for anything else.
    """
    names = [name.strip() for name in rollout_rs.split(",") if name.strip()]
    unknown = [name for name in names if name not in CRITERIA]
    if unknown or not names:
        raise ConfigError(
            f"rollout_rs={rollout_rs!r}: {unknown[0] if unknown else 'nothing'!r} is not a "
            f"criterion; use some of {', '.join(CRITERIA)}"
        )
    if rollout_rs_threshold is None:
        raise ConfigError(f"rollout_rs={rollout_rs!r} needs rollout_rs_threshold, e.g. '0.5_2.0'")
    given = [part.strip() for part in str(rollout_rs_threshold).split(",")]
    if len(given) == 1:
        given *= len(names)
    if len(given) != len(names):
        raise ConfigError(
            f"rollout_rs_threshold={rollout_rs_threshold!r} has {len(given)} entries for "
            f"{len(names)} criteria; give one, or one each"
        )
    return tuple(_criterion(name, text) for name, text in zip(names, given, strict=True))


def reject(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    criteria: tuple[Criterion, ...],
) -> tuple[Tensor, dict[str, float]]:
    """The mask `[B, T]` (dtype as given) of what passes every criterion, and shares rejected.

    Metrics: `rollout_rs_{criterion}_masked_fraction` by criterion, `rollout_rs_masked_fraction`
    of tokens and `rollout_rs_seq_masked_fraction` of completions that lost a token.
    """
    before = response_mask.bool()
    gap, kept, metrics = old_log_probs - rollout_log_probs, before, {}
    for criterion in criteria:
        passed = criterion.kept(gap, response_mask)
        share = float(masked_mean((~passed).double(), before))
        metrics[f"rollout_rs_{criterion.name}_masked_fraction"] = share
        kept = kept & passed
    lost = before & ~kept
    metrics["rollout_rs_masked_fraction"] = float(masked_mean(lost.double(), before))
    metrics["rollout_rs_seq_masked_fraction"] = float(
        masked_mean(lost.any(1).double(), before.any(1))
    )
    return mask_out(kept, response_mask), metrics


def _criterion(name: str, text: str) -> Criterion:
    level, kind = name.rsplit("_", 1)
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        numbers = []
    allowed = (1, 2) if kind == "k1" else (1,)
    if len(numbers) not in allowed or min(numbers) <= 0 or sorted(numbers) != numbers:
        form = "low_high with 0 < low ≤ high" if kind == "k1" else "one number above 0"
        raise ConfigError(f"rollout_rs_threshold={text!r} for {name}: give {form}")
    if kind != "k1":
        return Criterion(level, kind, -math.inf, numbers[0])
    if len(numbers) == 1 and numbers[0] < 1:
        raise ConfigError(f"rollout_rs_threshold={text!r} for {name}: one number must be 1 or more")
    low = numbers[0] if len(numbers) == 2 else 1 / numbers[0]
    return Criterion(level, kind, math.log(low), math.log(numbers[-1]))
