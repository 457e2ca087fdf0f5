"""Inputs and outputs of preference losses, and the registry of those on pairs.

What lives here: the tables, the wrapper that checks them, sums of log-probs. No formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from engine.algorithms.masked import at_least_float, masked_sum
from engine.algorithms.metrics import MeanAccumulator, accumulate_mean
from engine.algorithms.plugin_loss import require_finite_loss
from engine.errors import ConfigError, DataError
from engine.registry import Options, Registry


@dataclass(frozen=True, slots=True)
class Pairs:
    """B pairs: log-probs of whole responses, summed over their tokens, all `[B]` float."""

    policy_chosen: Tensor
    policy_rejected: Tensor
    chosen_length: Tensor
    """Tokens of the chosen response, 1 or more."""
    rejected_length: Tensor
    ref_chosen: Tensor | None = None
    """The reference's log-probs; None for losses without a reference."""
    ref_rejected: Tensor | None = None

    def log_ratios(self, per_token: bool = False) -> tuple[Tensor, Tensor]:
        """log π − log π_ref of chosen and rejected; divided by length when `per_token`."""
        assert self.ref_chosen is not None, "checked by PairLoss"
        assert self.ref_rejected is not None, "checked by PairLoss"
        chosen = self.policy_chosen - self.ref_chosen
        rejected = self.policy_rejected - self.ref_rejected
        if per_token:
            return chosen / self.chosen_length, rejected / self.rejected_length
        return chosen, rejected

    def per_token(self) -> tuple[Tensor, Tensor]:
        """Mean log-prob of a token of chosen and rejected."""
        return self.policy_chosen / self.chosen_length, self.policy_rejected / self.rejected_length


@dataclass(frozen=True, slots=True)
class PreferenceOutput:
    """A loss a row and metrics as sums and counts (`rewards/…`: implicit rewards)."""

    loss: Tensor
    """`[B]`."""
    metrics: Mapping[str, MeanAccumulator]


Formula = Callable[..., PreferenceOutput]


@dataclass(frozen=True, slots=True)
class PairLoss:
    """A registered formula on pairs; call it like the formula."""

    name: str
    formula: Formula
    options: Options
    needs_reference: bool
    validate: Callable[..., None] | None

    def __call__(self, pairs: Pairs, **options: object) -> PreferenceOutput:
        """Loss of B pairs; gradient flows into the policy's log-probs only.

        Raises ConfigError for wrong options, DataError for missing or ill-shaped inputs, and
        EngineError for a plugin's loss that is not finite.
        """
        self.check_options(options)
        given = self._checked(pairs)
        out = self.formula(given, **options)
        owner, inputs = (
            f"preference loss {self.name!r}",
            (given.policy_chosen, given.policy_rejected),
        )
        mask = torch.ones_like(given.policy_chosen, dtype=torch.bool)
        require_finite_loss(owner, self.formula, out.loss, *inputs, mask=mask)
        return out

    def check_options(self, options: Mapping[str, object]) -> None:
        """Raise ConfigError for options that this loss doesn't read or that are out of range."""
        self.options.require_known(options)
        merged: dict[str, Any] = {**self.options, **options}
        if "beta" in merged and merged["beta"] <= 0:
            raise ConfigError(f"beta={merged['beta']} must be above 0")
        if not 0 <= merged.get("label_smoothing", 0.0) < 0.5:
            raise ConfigError(
                f"label_smoothing={merged['label_smoothing']} must be at least 0 and below 0.5"
            )
        if self.validate is not None:
            self.validate(**merged)

    def _checked(self, pairs: Pairs) -> Pairs:
        if self.needs_reference and (pairs.ref_chosen is None or pairs.ref_rejected is None):
            raise DataError(
                f"preference loss {self.name!r} compares with a reference model; give ref_chosen "
                "and ref_rejected [B]"
            )
        cleaned: dict[str, Tensor] = {}
        for item in fields(pairs):
            value = getattr(pairs, item.name)
            if value is None:
                continue
            if value.shape != pairs.policy_chosen.shape or value.dim() != 1:
                raise DataError(
                    f"{item.name} has shape {list(value.shape)}, not "
                    f"[{pairs.policy_chosen.shape[0]}]"
                )
            wide = at_least_float(value)
            cleaned[item.name] = wide if item.name.startswith("policy") else wide.detach()
        for name in ("chosen_length", "rejected_length"):
            if bool((cleaned[name] < 1).any()):
                raise DataError(f"{name} has an empty response; drop that pair")
        return Pairs(**cleaned)


_registry: Registry[PairLoss] = Registry(
    "preference loss",
    "algorithm.preference.loss",
    "engine.algorithms.preference",
    "@register_pair_loss(name)",
)


def register_pair_loss(
    name: str,
    *aliases: str,
    needs_reference: bool = True,
    validate: Callable[..., None] | None = None,
) -> Callable[[Formula], PairLoss]:
    """Register `formula(pairs, *, option=default, …) -> PreferenceOutput` under `name`."""

    def decorate(formula: Formula) -> PairLoss:
        own = Options(f"preference loss {name!r}", formula)
        entry = PairLoss(name, formula, own, needs_reference, validate)
        _registry.add(name, entry, formula, aliases=aliases, options=own)
        return entry

    return decorate


get_pair_loss = _registry.get
names = _registry.names
options = _registry.options


def sequence_log_probs(log_probs: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of log-probs `[B]` and number of tokens `[B]` of `log_probs [B, T]`."""
    summed = masked_sum(at_least_float(log_probs), response_mask, 1)
    return summed, response_mask.bool().sum(1).to(summed.dtype)


def reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, MeanAccumulator]:
    """Implicit rewards `[B]` under TRL's names."""
    every = chosen.new_ones(chosen.shape)
    return {
        "rewards/chosen": accumulate_mean(chosen, every),
        "rewards/rejected": accumulate_mean(rejected, every),
        "rewards/margins": accumulate_mean(chosen - rejected, every),
        "rewards/accuracies": accumulate_mean((chosen > rejected).double(), every),
    }
