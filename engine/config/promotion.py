"""When a model becomes the champion: the rules of promotion, as data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.config.base import Section

GuardMetric = Literal["pass_at_1", "sampled", "majority", "format_rate"]


class GuardConfig(Section):
    """Problems on which the new model must not be worse."""

    dataset: str = Field("", description="Problems of this evaluation set; empty: of all")
    data_source: str = Field("", description="Of these, those of this source; empty: all of them")
    metric: GuardMetric = Field(
        "pass_at_1", description="Greedy, sampled or majority answers right, or format kept"
    )
    tolerance: float = Field(
        0.0, ge=0, lt=1, description="The change's lower end may be this far below 0"
    )

    @property
    def name(self) -> str:
        """How messages and evidence name it, e.g. `pass_at_1 of gsm8k`."""
        where = " in ".join(filter(None, (self.data_source, self.dataset)))
        return f"{self.metric} of {where or 'all problems'}"


class ContaminationConfig(Section):
    """How many test problems may be known from training."""

    max_share: float = Field(0.01, ge=0, le=1, description="Share of test prompts, at most")
    ngram: int = Field(13, ge=2, description="Words in a row that are compared")
    overlap: float = Field(
        0.8, gt=0, le=1, description="A prompt counts when this share of its n-grams was trained on"
    )


class RewardModelGateConfig(Section):
    """When a reward model becomes the champion among reward models."""

    model_name: str = Field(
        "hybridflyte-reward-model", min_length=1, description="Registered model in MLflow"
    )
    alias: str = Field("champion", min_length=1, description="Alias that a promotion moves")
    minimum_accuracy: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Share of held-out pairs that it ranks right; the lower end of the interval "
        "must top it",
    )
    minimum_gain: float = Field(
        0.0,
        ge=-1,
        lt=1,
        description="Over the champion on the same held-out pairs; the lower end of the interval "
        "must top it",
    )


class PromoteConfig(Section):
    """When a model becomes the champion."""

    model_name: str = Field(
        "hybridflyte-policy", min_length=1, description="Registered model in MLflow"
    )
    alias: str = Field("champion", min_length=1, description="Alias that a promotion moves")
    dataset: str = Field(
        "test",
        min_length=1,
        description="Evaluation set that decides: test, a name of data.evaluation_sets, or all: "
        "every one must pass",
    )
    minimum_gain: float = Field(
        0.0, ge=0, lt=1, description="Lower end of the interval must top it"
    )
    bootstrap: bool = Field(
        False, description="Let the first champion in without a gain over the warm start"
    )
    minimum_score: float | None = Field(
        None, ge=0, le=1, description="Greedy pass@1 of the new model; lower end of the interval"
    )
    guards: tuple[GuardConfig, ...] = Field((), description="Where it must not be worse")
    max_kl: float | None = Field(
        None, gt=0, description="Mean KL to the reference, last tenth of the model's RL steps"
    )
    max_length_ratio: float | None = Field(
        None, gt=0, description="Mean response length over the former's; upper end of the interval"
    )
    contamination: ContaminationConfig = ContaminationConfig()
    approval: Literal["none", "required"] = Field("none", description="Whether a person must agree")
    reward_model: RewardModelGateConfig = RewardModelGateConfig()
