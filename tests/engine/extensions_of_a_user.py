"""One of each that a user may add, in a module outside the package.

Ray's workers import this module too, because `plugins` names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from tiny_engine import arithmetic_rows

from engine.algorithms.advantages import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
    to_tokens,
)
from engine.algorithms.policy_losses import LossOutput, register_policy_loss
from engine.algorithms.preference_losses import Pairs, PreferenceOutput, register_pair_loss
from engine.config import DataConfig
from engine.data.sources import Splits, register_source
from engine.dataflows import recipes, register_dataflow
from engine.rewards import register_reward
from engine.rollout.native import NativeEngine
from engine.rollout.protocol import EngineCapabilities, register_engine

CALLS: list[tuple[str, Any]] = []  # what was called in this process, and with which option


@register_advantage("best_of_batch")
def best_of_batch(inputs: AdvantageInputs, *, scale: float = 1.0) -> AdvantageOutputs:
    CALLS.append(("best_of_batch", scale))
    scores = inputs.scores
    tokens = to_tokens(scale * (scores - scores.max()), inputs.response_mask)
    return AdvantageOutputs(tokens, tokens)


@register_policy_loss("tempered")
def tempered(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    power: float = 1.0,
) -> LossOutput:
    CALLS.append(("tempered", power))
    return LossOutput(-advantages * ((log_probs - old_log_probs).exp() ** power))


@register_pair_loss("squared")
def squared(pairs: Pairs, *, target: float = 1.0) -> PreferenceOutput:
    CALLS.append(("squared", target))
    chosen, rejected = pairs.log_ratios()
    return PreferenceOutput((chosen - rejected - target).square(), {})


@register_reward("vowels")
def vowels(
    prompts: Any, completions: Sequence[str], *, letters: tuple[str, ...] = ("a",), **columns: Any
) -> list[float]:
    CALLS.append(("vowels", letters))
    return [sum(text.count(letter) for letter in letters) for text in completions]


@register_dataflow("my_grpo", roles=("rollout", "reward", "actor"), optional=("reference",))
def my_grpo(roles: Any, prompts: Any, algo: Any, *, note: str = "") -> Any:
    CALLS.append(("my_grpo", note))
    return recipes.grpo(roles, prompts, algo)


@register_engine("counting", EngineCapabilities(streams=True))
class CountingEngine(NativeEngine):
    def __init__(self, model: Any, *, label: str = "", **options: Any) -> None:
        super().__init__(model, **options)
        CALLS.append(("counting", label))


@register_source("sums")
class Sums:
    def __init__(self, *, rows: int = 4) -> None:
        self.rows = rows

    def digest(self, config: DataConfig, seed: int) -> str:
        return str(self.rows)

    def load(self, config: DataConfig, seed: int) -> Splits:
        table = pd.DataFrame(arithmetic_rows(self.rows))
        return Splits(*[table] * 5, source_digest=str(self.rows), source_uri="none")
