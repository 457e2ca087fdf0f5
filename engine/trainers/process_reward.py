"""Process rewards: a score for each step of a response, learned from steps that are right or wrong.

The result is a token-classification folder with one label, which the reward `process_reward_model`
loads. The loop is in `offline`. Source: Lightman et al., "Let's verify step by step", 2305.20050.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from engine.batch import Batch
from engine.config import RewardModelTrainingConfig
from engine.data.step_examples import StepExample, collate_steps
from engine.errors import ConfigError
from engine.evaluation.metrics import wilson_interval
from engine.runtime.save_policy import StartModel
from engine.trainers.offline import OfflineTrainer, OnStep
from engine.trainers.offline_ranks import done
from engine.workers.process_reward import ProcessRewardWorker

CHUNK = 1024  # rows of one call to the ranks


class ProcessRewardTrainer(OfflineTrainer[StepExample, ProcessRewardWorker]):
    """Trains a model that scores steps; see `OfflineTrainer`. `read_steps` reads its rows.

    Metrics of a step are `reward_model/loss`, `accuracy` (of steps), `scores` (the mean probability
    of being right), `lr`, `grad_norm`, `tokens_per_s` and, where they were taken, what `validate`
    gives as `validation_…`. A model in memory is copied.
    """

    what = "the process reward model"
    no_rows = "the process reward model has no rows; give a source of rows with steps and labels"
    worker_class = ProcessRewardWorker

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
        that no token classifier can be made of."""
        if config.head != "token":
            raise ConfigError(
                f"reward_model.head={config.head} learns from pairs by RewardModelTrainer; set "
                "head=token"
            )
        super().__init__(model, pad_token_id, config, seed=seed, start=start, on_step=on_step)
        self.config = config

    def scores(self, examples: Sequence[StepExample]) -> list[Tensor]:
        """For each example the scores `[steps]` (float32) of its steps; right ones are above 0."""
        found = []
        for start in range(0, len(examples), CHUNK):
            some = examples[start : start + CHUNK]
            values = done(self._ranks.step_scores(self._collate(some)))["values"]
            for row, example in zip(values, some, strict=True):
                found.append(row[[end + 1 for end in example.ends]])
        return found

    def validate(self, examples: Sequence[StepExample]) -> dict[str, float]:
        """How well held-out steps are told apart.

        `loss`, `accuracy` a step with its 95 % Wilson interval (`accuracy_low`, `accuracy_high`),
        and `solution_accuracy`: the share of responses of which all steps are judged rightly.
        """
        scores = self.scores(examples)
        flat = torch.cat(scores).double()
        labels = torch.tensor([label for example in examples for label in example.labels])
        right = (flat > 0) == labels
        interval = wilson_interval(right.double().numpy(), 0.95)
        whole = [bool(part.all()) for part in right.split([len(one) for one in scores])]
        return {
            "loss": float(F.binary_cross_entropy_with_logits(flat, labels.double())),
            "accuracy": float(right.double().mean()),
            "accuracy_low": interval.low,
            "accuracy_high": interval.high,
            "solution_accuracy": sum(whole) / len(whole),
        }

    def _collate(self, examples: Sequence[StepExample]) -> Batch:
        return collate_steps(examples, self.pad_token_id)

    def _update(self, batch: Batch) -> dict[str, float]:
        return done(self._ranks.update_steps(batch))

    def _validate(self, examples: Sequence[StepExample]) -> dict[str, float]:
        found = self.validate(examples)
        return {f"validation_{name}": value for name, value in found.items()}
