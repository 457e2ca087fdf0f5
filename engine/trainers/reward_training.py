"""Training of rewards: reward models from pairs, process rewards from steps, likelihood rewards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.algorithms.preference_losses import bradley_terry
from engine.batch import Batch
from engine.config import OfflineConfig, PreferenceTrainingConfig, RewardModelTrainingConfig
from engine.data.training_examples import (
    PairExample,
    PreferenceExample,
    StepExample,
    collate_scored,
    collate_steps,
)
from engine.errors import ConfigError
from engine.evaluation.metrics import wilson_interval
from engine.trainers.offline import OfflineTrainer, done
from engine.trainers.preference_learning import PreferenceTrainer
from engine.workers.supervised import ProcessRewardWorker, RewardModelWorker

_HEADS = {
    "sequence": "learns from pairs by RewardModelTrainer",
    "token": "learns from steps by ProcessRewardTrainer",
    "likelihood": "has no head, and learns by LikelihoodRewardTrainer",
}
BINS = 10  # of confidence, for the calibration error


def _of_head(config: RewardModelTrainingConfig, head: str) -> RewardModelTrainingConfig:
    if config.head != head:
        raise ConfigError(f"reward_model.head={config.head} {_HEADS[config.head]}; set head={head}")
    return config


class RewardModelTrainer(OfflineTrainer[PairExample, RewardModelWorker]):
    """Trains a reward model on pairs; see `OfflineTrainer`. `read_reward_pairs` reads them.

    The result is a sequence-classification folder with one label, which the reward `reward_model`
    of RL loads. A model in memory is copied.

    Metrics of a step are `reward_model/loss`, `lr`, `grad_norm`, `tokens_per_s`, the mean scores
    `rewards/chosen` and `rewards/rejected`, `rewards/margins`, `rewards/accuracies`, and, where
    they were taken, what `validate` gives as `validation_…`.
    """

    what = "the reward model"
    no_rows = "the reward model has no rows; give a source of pairs"
    worker_class = RewardModelWorker

    config: RewardModelTrainingConfig

    def _checked(self, config: RewardModelTrainingConfig) -> OfflineConfig:
        return _of_head(config, "sequence")

    def scores(self, examples: Sequence[PairExample]) -> Tensor:
        """Scores `[N, 2]` (float32) of the chosen and the rejected conversations."""
        parts = [done(self._ranks.scores(batch))["scores"] for batch in self._chunks(examples)]
        return torch.cat(parts).view(-1, 2)

    def validate(self, examples: Sequence[PairExample]) -> dict[str, float]:
        margins = torch.tensor([example.margin for example in examples], dtype=torch.float64)
        return ranking(self.scores(examples), margins, self.config.center_rewards_coefficient)

    def _collate(self, examples: Sequence[PairExample]) -> Batch:
        return collate_scored(examples, self.pad_token_id)


def ranking(scores: Tensor, margins: Tensor, center: float) -> dict[str, float]:
    """How well pairs are ranked by scores `[N, 2]` of the chosen and the rejected response.

    `loss`, `accuracy` with its 95 % Wilson interval (`accuracy_low`, `accuracy_high`), the mean
    `margin` of the scores, and `calibration_error`: how far σ(margin) is from the share of pairs
    that are ranked right, the mean over pairs in bins of confidence. `margins` `[N]` and `center`
    are the loss's.
    """
    chosen, rejected = scores.double().unbind(1)
    out = bradley_terry(chosen, rejected, margins, center_rewards_coefficient=center)
    return (
        {"loss": float(out.loss.mean())}
        | _accuracy(chosen > rejected)
        | {
            "margin": float((chosen - rejected).mean()),
            "calibration_error": calibration_error(chosen - rejected),
        }
    )


def _accuracy(right: Tensor) -> dict[str, float]:
    interval = wilson_interval(right.double().numpy(), 0.95)
    low, high = interval.low, interval.high
    return {"accuracy": float(right.double().mean()), "accuracy_low": low, "accuracy_high": high}


def calibration_error(gaps: Tensor) -> float:
    """Expected calibration error of score differences `[N]` (arXiv:1706.04599, eq. 5)."""
    confidence, right = torch.sigmoid(gaps.abs()), (gaps > 0).double()
    bins = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    error = 0.0
    for index in bins.unique():
        inside = bins == index
        error += float(inside.sum() * (confidence[inside].mean() - right[inside].mean()).abs())
    return error / len(gaps)


class _Settings(PreferenceTrainingConfig):
    """Of the preference loss, under the name of the reward model."""

    section: ClassVar[str] = "reward_model"


class LikelihoodRewardTrainer(PreferenceTrainer):
    """Trains a language model on pairs to be a reward model: a response's log-prob is its score.

    Where right and wrong hang on single tokens that the policy can predict, such as digits, it
    ranks better than a new head. The reward `likelihood` of RL loads the folder.
    `read_preferences` reads pairs. Metrics are those of `RewardModelTrainer`. A model in memory is
    trained in place.
    """

    what = "the reward model"
    no_rows = "the reward model has no rows; give a source of pairs"

    def _checked(self, config: Any) -> PreferenceTrainingConfig:
        config = _of_head(config, "likelihood")
        values = {name: getattr(config, name) for name in OfflineConfig.model_fields}
        values |= {"loss": "likelihood", "sft_weight": config.sft_weight}
        return super()._checked(_Settings.model_validate(values))

    def scores(self, examples: Sequence[PreferenceExample]) -> Tensor:
        """Log-probs `[N, 2]` (float32) of the chosen and the rejected responses."""
        return self._response_log_probs(examples, reference=False).view(-1, 2)

    def validate(self, examples: Sequence[PreferenceExample]) -> dict[str, float]:
        return ranking(self.scores(examples), torch.zeros(len(examples), dtype=torch.float64), 0.0)


class ProcessRewardTrainer(OfflineTrainer[StepExample, ProcessRewardWorker]):
    """Trains a model that scores steps; see `OfflineTrainer`. `read_steps` reads its rows.

    The result is a token-classification folder with one label, which the reward
    `process_reward_model` loads. Source: Lightman et al., arXiv:2305.20050. A model in memory is
    copied.

    Metrics of a step are `reward_model/loss`, `accuracy` (of steps), `scores` (the mean probability
    of being right), `lr`, `grad_norm`, `tokens_per_s` and, where they were taken, what `validate`
    gives as `validation_…`.
    """

    what = "the process reward model"
    no_rows = "the process reward model has no rows; give a source of rows with steps and labels"
    worker_class = ProcessRewardWorker

    config: RewardModelTrainingConfig

    def _checked(self, config: RewardModelTrainingConfig) -> OfflineConfig:
        return _of_head(config, "token")

    def scores(self, examples: Sequence[StepExample]) -> list[Tensor]:
        """For each example the scores `[steps]` (float32) of its steps; right ones are above 0."""
        parts = [done(self._ranks.step_scores(batch))["values"] for batch in self._chunks(examples)]
        rows = zip(itertools.chain.from_iterable(parts), examples, strict=True)
        return [row[[end + 1 for end in example.ends]] for row, example in rows]

    def validate(self, examples: Sequence[StepExample]) -> dict[str, float]:
        """How well held-out steps are told apart.

        `loss`, `accuracy` a step with its 95 % Wilson interval, and `solution_accuracy`: the share
        of responses of which all steps are judged rightly.
        """
        scores = self.scores(examples)
        flat = torch.cat(scores).double()
        labels = torch.tensor([label for example in examples for label in example.labels])
        right = (flat > 0) == labels
        all_right = [bool(part.all()) for part in right.split([len(steps) for steps in scores])]
        loss = float(F.binary_cross_entropy_with_logits(flat, labels.double()))
        solutions = sum(all_right) / len(all_right)
        return {"loss": loss} | _accuracy(right) | {"solution_accuracy": solutions}

    def _collate(self, examples: Sequence[StepExample]) -> Batch:
        return collate_steps(examples, self.pad_token_id)

    def _update(self, batch: Batch) -> dict[str, float]:
        return done(self._ranks.update_steps(batch))
