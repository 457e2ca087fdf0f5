"""A reward model that stays a language model: a response's log-prob is its score.

Where right and wrong hang on single tokens that the policy can predict, such as digits, it ranks
better than a new head, which has to learn from one bit a pair what the language model knows. The
loss is the preference loss `likelihood`, the folder a language model's, which the reward
`likelihood` of RL loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.config import OfflineConfig, PreferenceTrainingConfig, RewardModelTrainingConfig
from engine.data.preference_examples import PreferenceExample
from engine.errors import ConfigError
from engine.runtime.save_policy import StartModel
from engine.trainers.offline import OnStep
from engine.trainers.preference import PreferenceTrainer
from engine.trainers.reward_model import ranking


class _Settings(PreferenceTrainingConfig):
    """Of the preference loss, under the name of the reward model."""

    section: ClassVar[str] = "reward_model"


class LikelihoodRewardTrainer(PreferenceTrainer):
    """Trains a language model on pairs to be a reward model. `read_preferences` reads them.

    Metrics are those of `RewardModelTrainer`. A model in memory is trained in place.
    """

    what = "the reward model"
    no_rows = "the reward model has no rows; give a source of pairs"

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
        """As `OfflineTrainer`; ConfigError for a config of another head."""
        if config.head != "likelihood":
            raise ConfigError(
                f"reward_model.head={config.head} is of another trainer; set head=likelihood"
            )
        values = {name: getattr(config, name) for name in OfflineConfig.model_fields}
        values |= {"loss": "likelihood", "sft_weight": config.sft_weight}
        own = _Settings.model_validate(values)
        super().__init__(model, pad_token_id, own, seed=seed, start=start, on_step=on_step)

    def scores(self, examples: Sequence[PreferenceExample]) -> Tensor:
        """Log-probs `[N, 2]` (float32) of the chosen and the rejected responses."""
        return self._response_log_probs(examples, reference=False).view(-1, 2)

    def validate(self, examples: Sequence[PreferenceExample]) -> dict[str, float]:
        """How well held-out pairs are ranked; see `ranking`."""
        return ranking(self.scores(examples), torch.zeros(len(examples), dtype=torch.float64), 0.0)

    def _validate(self, examples: Sequence[PreferenceExample]) -> dict[str, float]:
        return {f"validation_{name}": value for name, value in self.validate(examples).items()}
