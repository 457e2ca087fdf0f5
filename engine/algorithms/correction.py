"""Rollout correction: tokens were sampled by another policy than the one that learns.

Importance weights, and the rejection of tokens or completions that are too far off-policy: it edits
response_mask, from which denominators must be taken. Call it on the GLOBAL batch before the update:
normalisation and metrics look at all of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithms import checks
from engine.algorithms.aggregation import MeanAccumulator, accumulate_max, accumulate_mean
from engine.algorithms.masked import at_least_float, mask_out, masked_mean, masked_sum
from engine.errors import ConfigError

_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda gap: -gap,
    "k2": lambda gap: 0.5 * gap.square(),
    "k3": lambda gap: torch.expm1(gap) - gap,
}
_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
CRITERIA = tuple(f"{level}_{kind}" for level in _LEVELS for kind in _ESTIMATORS)


@dataclass(frozen=True, slots=True)
class Criterion:
    """Keep where `low ≤ statistic ≤ high`; the statistic is an estimate of KL(rollout ‖ old)."""

    level: str
    kind: str
    low: float
    high: float

    def passes(self, gap: Tensor, mask: Tensor) -> Tensor:
        """Return the tokens `[B, T]` (bool) to keep; the gap is log π_old − log π_rollout."""
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
    thresholds = [part.strip() for part in str(rollout_rs_threshold).split(",")]
    if len(thresholds) == 1:
        thresholds *= len(names)
    if len(thresholds) != len(names):
        raise ConfigError(
            f"rollout_rs_threshold={rollout_rs_threshold!r} has {len(thresholds)} entries for "
            f"{len(names)} criteria; give one, or one each"
        )
    return tuple(_criterion(name, text) for name, text in zip(names, thresholds, strict=True))


def reject(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    criteria: tuple[Criterion, ...],
) -> tuple[Tensor, dict[str, float]]:
    """Return the mask `[B, T]` (dtype as given) of what passes, and the shares rejected.

    Metrics: `rollout_rs_{criterion}_masked_fraction` by criterion, `rollout_rs_masked_fraction`
    of tokens and `rollout_rs_seq_masked_fraction` of completions that lost a token.
    """
    before = response_mask.bool()
    gap, lost, shares = old_log_probs - rollout_log_probs, torch.zeros_like(before), {}
    for criterion in criteria:
        failed = before & ~criterion.passes(gap, response_mask)
        share = masked_mean(failed.double(), before)
        shares[f"rollout_rs_{criterion.level}_{criterion.kind}_masked_fraction"] = float(share)
        lost = lost | failed
    rows = masked_mean(lost.any(1).double(), before.any(1))
    shares["rollout_rs_masked_fraction"] = float(masked_mean(lost.double(), before))
    shares["rollout_rs_seq_masked_fraction"] = float(rows)
    return mask_out(~lost, response_mask), shares


def _criterion(name: str, text: str) -> Criterion:
    level, kind = name.rsplit("_", 1)
    numbers = _numbers(text)
    if len(numbers) not in ((1, 2) if kind == "k1" else (1,)):
        form = "low_high with 0 < low ≤ high" if kind == "k1" else "one number above 0"
        raise ConfigError(f"rollout_rs_threshold={text!r} for {name}: give {form}")
    if kind != "k1":
        return Criterion(level, kind, -math.inf, numbers[0])
    if len(numbers) == 1 and numbers[0] < 1:
        raise ConfigError(f"rollout_rs_threshold={text!r} for {name}: one number must be 1 or more")
    low = numbers[0] if len(numbers) == 2 else 1 / numbers[0]
    return Criterion(level, kind, math.log(low), math.log(numbers[-1]))


def _numbers(text: str) -> list[float]:
    """Parse numbers above 0 in ascending order, e.g. "0.5_2.0"; return none for anything else."""
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        return []
    return numbers if numbers[0] > 0 and sorted(numbers) == numbers else []


GAP_PREFIXES = ("rollout_corr/", "training/")  # of `gap_metrics`' names
_BOUND = 20.0


@dataclass(frozen=True, slots=True)
class Correction:
    """Weights, mask and metrics; take denominators from this mask, not from the one before."""

    weights: Tensor | None  # [B, T], no gradient, 0 outside the edited mask; None: no `rollout_is`
    response_mask: Tensor  # [B, T], edited by rejection
    metrics: dict[str, float]  # under verl's names, without a prefix


def correct_rollout(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
) -> Correction:
    """Compute weights, mask and metrics of a batch, all `[B, T]`; L = log π_old − log π_rollout.

    rollout_is: `token` e^{L_t}, `sequence` e^{ΣL} (both with the exponent clamped to ±20).
    rollout_is_threshold: a number C truncates weights at C (TIS); `"low_high"` sets weights
    outside to 0 (IcePop). Batch normalisation then divides by the mean weight, by tokens or by
    completions, over what rejection left. rollout_rs: see `parse_criteria`.
    Source: TIS, Yao et al. (2025); IcePop, arXiv 2510.18855.
    Raises ConfigError for wrong settings, DataError for unequal shapes.
    """
    low, high = check_correction(rollout_is, rollout_is_threshold, rollout_rs, rollout_rs_threshold)
    both = {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs}
    checks.shapes(both, response_mask)
    old = mask_out(response_mask, at_least_float(old_log_probs.detach()))
    rollout = mask_out(response_mask, at_least_float(rollout_log_probs.detach()))
    metrics, mask = mismatch_metrics(old, rollout, response_mask), response_mask
    if rollout_rs is not None:
        criteria = parse_criteria(rollout_rs, rollout_rs_threshold)
        mask, more = reject(old, rollout, response_mask, criteria)
        metrics |= more
    if rollout_is is None:
        return Correction(None, mask, metrics)
    gap = mask_out(response_mask, old - rollout)
    if rollout_is == "sequence":  # the product over the completion, on each of its tokens
        gap = gap.sum(1, keepdim=True).expand(gap.shape)
    raw = mask_out(response_mask, gap.clamp(-_BOUND, _BOUND).exp())
    weights = raw.clamp(max=high) if low is None else mask_out((raw >= low) & (raw <= high), raw)
    metrics |= _weight_metrics(raw, weights, mask, low, high)
    if rollout_is_batch_normalize:
        if rollout_is == "token":
            mean = masked_mean(weights, mask)
        else:
            mean = masked_mean(masked_mean(weights, mask, 1), mask.bool().any(1))
        metrics["rollout_is_batch_norm_factor"] = float(mean) if float(mean) > 1e-8 else 1.0
        weights = weights / metrics["rollout_is_batch_norm_factor"]
    return Correction(mask_out(mask, weights), mask, metrics)


def check_correction(
    rollout_is: str | None,
    rollout_is_threshold: str | float,
    rollout_rs: str | None,
    rollout_rs_threshold: str | float | None,
) -> tuple[float | None, float]:
    """Validate the settings of `correct_rollout`; return the weights' bounds (low, high)."""
    if rollout_is is not None and rollout_is not in ("token", "sequence"):
        raise ConfigError(f"rollout_is={rollout_is!r} is unknown; use token, sequence or null")
    if rollout_rs is not None:
        parse_criteria(rollout_rs, rollout_rs_threshold)
    elif rollout_rs_threshold is not None:
        raise ConfigError(
            f"rollout_rs_threshold={rollout_rs_threshold!r} has no effect without rollout_rs; "
            "set rollout_rs, or remove it"
        )
    numbers = _numbers(str(rollout_is_threshold))
    if len(numbers) not in (1, 2):
        raise ConfigError(
            f"rollout_is_threshold={rollout_is_threshold!r}: give one number above 0 (truncate) "
            "or low_high with 0 < low ≤ high (mask)"
        )
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


def mismatch_metrics(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """Measure how far the sampling policy is from the trained one; ideal values in brackets.

    kl and k3_kl estimate KL(rollout ‖ old) [0]; training_ppl, rollout_ppl are perplexities by
    completion and ppl_ratio their mean ratio [1]; chi2_token and chi2_seq are E[ρ²] − 1 [0].
    All are 0 (ratios 1) for a batch without tokens.
    """
    mask, rows = response_mask, response_mask.bool().any(1)
    gap = mask_out(mask, old_log_probs.double() - rollout_log_probs.double())
    safe = gap.clamp(-_BOUND, _BOUND)
    trained = masked_mean(old_log_probs.double(), mask, 1)
    sampled = masked_mean(rollout_log_probs.double(), mask, 1)
    squared_seq = (2 * masked_sum(gap, mask, 1).clamp(-_BOUND, _BOUND)).exp()
    means = {
        "kl": masked_mean(-gap, mask),
        "k3_kl": masked_mean(torch.expm1(safe) - safe, mask),
        "training_ppl": masked_mean((-trained).exp(), rows),
        "rollout_ppl": masked_mean((-sampled).exp(), rows),
        "log_ppl_diff": masked_mean(sampled - trained, rows),
        "log_ppl_abs_diff": masked_mean((sampled - trained).abs(), rows),
        "ppl_ratio": masked_mean((sampled - trained).exp(), rows),
        "chi2_token": masked_mean(torch.expm1(2 * safe), mask),
        "chi2_seq": masked_mean(squared_seq - 1, rows),
    }
    return {name: float(value) for name, value in means.items()}


def gap_metrics(
    log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> dict[str, MeanAccumulator]:
    """Measure how far the trainer's log-probs `[B, T]` are from rollout's of the same weights.

    kl and k3_kl as `mismatch_metrics`; mean and maximum of |Δ log p|, and of |Δ p| as verl names
    them.
    """
    mask = response_mask
    trained = mask_out(mask, log_probs.detach().double())
    sampled = mask_out(mask, rollout_log_probs.detach().double())
    gap, between = trained - sampled, (trained.exp() - sampled.exp()).abs()
    safe = gap.clamp(-_BOUND, _BOUND)
    return {
        "rollout_corr/kl": accumulate_mean(-gap, mask),
        "rollout_corr/k3_kl": accumulate_mean(torch.expm1(safe) - safe, mask),
        "rollout_corr/log_prob_diff_mean": accumulate_mean(gap.abs(), mask),
        "rollout_corr/log_prob_diff_max": accumulate_max(gap.abs(), mask),
        "training/rollout_probs_diff_mean": accumulate_mean(between, mask),
        "training/rollout_probs_diff_max": accumulate_max(between, mask),
    }


def _weight_metrics(
    raw: Tensor, weights: Tensor, mask: Tensor, low: float | None, high: float
) -> dict[str, float]:
    """Describe the applied weights before normalisation, by token of the edited mask."""
    inside = weights[mask.bool()].double()
    outside = raw[mask.bool()]
    if not inside.numel():
        return {"rollout_is_mean": 0.0, "rollout_is_eff_sample_size": 0.0}
    below = 1 / high if low is None else low
    squares = float(inside.square().sum())
    effective = float(inside.sum()) ** 2 / squares / inside.numel() if squares else 0.0
    return {
        "rollout_is_mean": float(inside.mean()),
        "rollout_is_max": float(inside.max()),
        "rollout_is_min": float(inside.min()),
        "rollout_is_std": float(inside.std(correction=0)),
        "rollout_is_eff_sample_size": effective,
        "rollout_is_ratio_fraction_high": float((outside > high).double().mean()),
        "rollout_is_ratio_fraction_low": float((outside < below).double().mean()),
    }
