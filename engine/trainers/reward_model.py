"""Reward models: a score for a conversation, learned from pairs (Bradley-Terry).

The result is a sequence-classification folder with one label, which the reward `reward_model` of
RL loads. The loop is in `offline`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.algorithms.preference import bradley_terry
from engine.batch import Batch
from engine.config import RewardModelTrainingConfig
from engine.data.preference_examples import PairExample, collate_scored
from engine.errors import ConfigError
from engine.evaluation.metrics import wilson_interval
from engine.runtime.save_policy import StartModel
from engine.trainers.offline import OfflineTrainer, OnStep
from engine.trainers.offline_ranks import done
from engine.workers.reward_model import RewardModelWorker

CHUNK = 1024  # pairs of one call to the ranks
OTHERS = {
    "token": "learns from steps by ProcessRewardTrainer",
    "likelihood": "has no head, and learns by LikelihoodRewardTrainer",
}
BINS = 10  # of confidence, for the calibration error


class RewardModelTrainer(OfflineTrainer[PairExample, RewardModelWorker]):
    """Trains a reward model on pairs; see `OfflineTrainer`. `read_reward_pairs` reads them.

    Metrics of a step are `reward_model/loss`, `lr`, `grad_norm`, `tokens_per_s`, the mean scores
    `rewards/chosen` and `rewards/rejected`, `rewards/margins`, `rewards/accuracies`, and, where
    they were taken, what `validate` gives as `validation_…`. A model in memory is copied.
    """

    what = "the reward model"
    no_rows = "the reward model has no rows; give a source of pairs"
    worker_class = RewardModelWorker

    def __init__(
        self,
        model: PreTrainedModel | StartModel,
        pad_token_id: int,
        config: RewardModelTrainingConfig,
        *,
        seed: int,
        start: str = "",
        on_step: OnStep = lambda step, total, metrics: None,
    ) -> None:
        """As `OfflineTrainer`; ConfigError for a config of the other head, ModelError for a model
        that no classifier can be made of."""
        if config.head != "sequence":
            raise ConfigError(
                f"reward_model.head={config.head} {OTHERS[config.head]}; set head=sequence"
            )
        super().__init__(model, pad_token_id, config, seed=seed, start=start, on_step=on_step)
        self.config = config

    def scores(self, examples: Sequence[PairExample]) -> Tensor:
        """Scores `[N, 2]` (float32) of the chosen and the rejected conversations."""
        found = []
        for start in range(0, len(examples), CHUNK):
            batch = self._collate(examples[start : start + CHUNK])
            found.append(done(self._ranks.scores(batch))["scores"])
        return torch.cat(found).view(-1, 2)

    def validate(self, examples: Sequence[PairExample]) -> dict[str, float]:
        """How well held-out pairs are ranked; see `ranking`."""
        margins = torch.tensor([example.margin for example in examples], dtype=torch.float64)
        return ranking(self.scores(examples), margins, self.config.center_rewards_coefficient)

    def _collate(self, examples: Sequence[PairExample]) -> Batch:
        return collate_scored(examples, self.pad_token_id)

    def _update(self, batch: Batch) -> dict[str, float]:
        return done(self._ranks.update(batch))

    def _validate(self, examples: Sequence[PairExample]) -> dict[str, float]:
        found = self.validate(examples)
        return {f"validation_{name}": value for name, value in found.items()}


def ranking(scores: Tensor, margins: Tensor, center: float) -> dict[str, float]:
    """How well pairs are ranked by scores `[N, 2]` of the chosen and the rejected response.

    `loss`, `accuracy` with its 95 % Wilson interval (`accuracy_low`, `accuracy_high`), the mean
    `margin` of the scores, and `calibration_error`: how far σ(margin) is from the share of pairs
    that are ranked right, the mean over pairs in bins of confidence. `margins` `[N]` and `center`
    are the loss's.
    """
    chosen, rejected = scores.double().unbind(1)
    out = bradley_terry(chosen, rejected, margins, center_rewards_coefficient=center)
    right = (chosen > rejected).double()
    interval = wilson_interval(right.numpy(), 0.95)
    return {
        "loss": float(out.loss.mean()),
        "accuracy": float(right.mean()),
        "accuracy_low": interval.low,
        "accuracy_high": interval.high,
        "margin": float((chosen - rejected).mean()),
        "calibration_error": calibration_error(chosen - rejected),
    }


def calibration_error(gaps: Tensor) -> float:
    """Expected calibration error of score differences `[N]`, chosen less rejected.

    A pair's confidence is σ(|gap|), from 0.5 to 1, in bins of equal width. Source: Guo et al.,
    arXiv 1706.04599, eq. 5.
    """
    confidence, right = torch.sigmoid(gaps.abs()), (gaps > 0).double()
    bins = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    error = 0.0
    for one in bins.unique():
        inside = bins == one
        error += float(inside.sum() * (confidence[inside].mean() - right[inside].mean()).abs())
    return error / len(gaps)
