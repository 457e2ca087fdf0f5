"""Per-token estimates of KL(π ‖ π_ref) from log-probs of sampled tokens.

What lives here: the estimators, by name, and the controllers of the penalty's coefficient.
What does not: the exact divergence over a vocabulary (`kl_full`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.algorithms.masked import at_least_float, mask_out
from engine.errors import ConfigError, DataError


def k1(d: Tensor) -> Tensor:
    """d: unbiased, of high variance, negative on some tokens."""
    return d


def absolute(d: Tensor) -> Tensor:
    """|d|."""
    return d.abs()


def k2(d: Tensor) -> Tensor:
    """d²/2: biased, of low variance; its gradient is an unbiased gradient of the KL."""
    return 0.5 * d.square()


def k3(d: Tensor) -> Tensor:
    """e^{−d} + d − 1 ≥ 0: unbiased and of low variance; clamped to ±10, d to ±20."""
    d = d.clamp(-20.0, 20.0)
    # expm1 keeps the sum of nearly cancelling terms from going below zero near d = 0.
    return (torch.expm1(-d) + d).clamp(-10.0, 10.0)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "kl": k1,
    "abs": absolute,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
}
NAMES: tuple[str, ...] = (*_ESTIMATORS, *(f"{name}+" for name in _ESTIMATORS), "full")
"""`full` is exact over the vocabulary and needs logits: see `engine.algorithms.kl_full`."""


def check_kind(kind: str) -> None:
    """Raise ConfigError when `kind` is not the name of an estimator."""
    if kind not in NAMES:
        raise ConfigError(f"KL estimator {kind!r} is unknown; use one of {', '.join(NAMES)}")


def kl_estimate(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    kind: str = "low_var_kl",
    mask: Tensor | None = None,
) -> Tensor:
    """Estimate KL(π ‖ π_ref) at each token, `[B, T]`, with d = log π − log π_ref.

    kinds: k1 = kl: d · abs: |d| · k2 = mse: d²/2 · k3 = low_var_kl: e^{−d} + d − 1.
    A suffix `+` keeps the value and takes the gradient of k2, which is the unbiased gradient of
    the KL when the tokens are sampled from π. Reference log-probs get no gradient.
    With `mask [B, T]` the result is 0 outside it whatever the inputs are there; without, entries
    outside must be finite, or their gradient is not.
    Source: Schulman, "Approximating KL Divergence" (2020).
    Raises ConfigError for an unknown kind or `full`, DataError for unequal shapes.
    """
    check_kind(kind)
    if kind == "full":
        raise ConfigError(
            "KL estimator 'full' needs the distributions over the vocabulary; "
            "use engine.algorithms.kl_full.full_kl with logits"
        )
    if log_probs.shape != ref_log_probs.shape:
        raise DataError(
            f"log_probs {list(log_probs.shape)} and ref_log_probs {list(ref_log_probs.shape)} "
            "differ in shape"
        )
    d = at_least_float(log_probs) - at_least_float(ref_log_probs.detach())
    if mask is not None:
        # Cleaning d, where all estimators are 0 and have finite slopes, cleans both directions.
        d = mask_out(mask, d)
    value = _ESTIMATORS[kind.removesuffix("+")](d)
    if not kind.endswith("+"):
        return value
    gradient = k2(d)
    return gradient - gradient.detach() + value.detach()


class FixedKL:
    """A KL coefficient that stays as it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, samples: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state_dict`."""
        self.value = float(state["value"])


class AdaptiveKL(FixedKL):
    """A KL coefficient that is steered until the KL is at its target.

    Source: Ziegler et al., arXiv 1909.08593, section 2.2. The state belongs into checkpoints: a
    resumed run would otherwise start from the first coefficient again.
    """

    def __init__(self, kl_coef: float, target_kl: float, horizon: int) -> None:
        """Raise ConfigError when target or horizon are not above 0."""
        super().__init__(kl_coef)
        if target_kl <= 0 or horizon <= 0:
            raise ConfigError(
                f"kl_ctrl.target_kl={target_kl} and kl_ctrl.horizon={horizon} must be above 0"
            )
        self.target_kl, self.horizon = target_kl, horizon

    def update(self, current_kl: float, samples: int) -> None:
        """β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon) after n samples (completions).

        Raises DataError when the KL is not finite: β would be lost for good.
        """
        if not math.isfinite(current_kl):
            raise DataError(
                f"KL to the reference is {current_kl}; look at the log-probs of policy and "
                "reference on the tokens inside the mask"
            )
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        # A floor, since more samples at once than five horizons would turn β to 0 or negative.
        self.value *= max(0.1, 1 + error * samples / self.horizon)
