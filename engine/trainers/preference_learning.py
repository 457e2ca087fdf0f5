"""Preference learning offline: DPO and its relatives, KTO, and the training of reward models."""

import hashlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F

from engine.algorithms import preference_losses
from engine.algorithms.aggregation import compute_means
from engine.algorithms.preference_losses import bradley_terry
from engine.batch import Batch
from engine.config import OfflineConfig, PreferenceTrainingConfig, RewardModelTrainingConfig
from engine.data.training_examples import (
    LabelledExample,
    PairExample,
    PreferenceExample,
    StepExample,
    collate_preferences,
    collate_scored,
    collate_steps,
    examples_digest,
    with_others,
)
from engine.errors import ConfigError, DataError, StorageError
from engine.evaluation.metrics import mean_interval
from engine.storage.filesystem import Files
from engine.trainers.offline import OfflineTrainer, done
from engine.workers.actor import as_pairs
from engine.workers.algorithm_options import (
    check_preference_training,
    kto_options,
    preference_options,
)
from engine.workers.supervised import (
    PreferenceWorker,
    ProcessRewardWorker,
    RewardModelWorker,
    uses_reference,
)

log = logging.getLogger(__name__)


class PreferenceTrainer(OfflineTrainer[PreferenceExample, PreferenceWorker]):
    """Trains a policy on preferences; see `OfflineTrainer`.

    Metrics of a step are `preference/loss`, `lr`, `grad_norm`, `tokens_per_s`, the implicit rewards
    `rewards/chosen` and `rewards/rejected`, of pairs `rewards/margins` and `rewards/accuracies`, of
    KTO `kl`, and, where they were taken, the same of validation examples as `validation_…`.
    """

    what = "preference learning"
    no_rows = "preference learning has no rows; give a source of pairs, or of labelled completions"
    worker_class = PreferenceWorker

    config: PreferenceTrainingConfig
    _trained = False  # whether the model has left its start

    def _checked(self, config: PreferenceTrainingConfig) -> PreferenceTrainingConfig:
        check_preference_training(config)
        return config

    def precompute_reference(
        self, splits: Sequence[Sequence[PreferenceExample]], folder: str | Path
    ) -> None:
        """Keep the reference's log-probs of the examples in `folder`, a `reference_cache`."""
        with self._own_threads_and_draws():
            for examples in splits:
                self._with_reference(examples, str(folder))

    def _prepare(
        self,
        train: Sequence[PreferenceExample],
        validation: Sequence[PreferenceExample],
        folder: str | Path | None,
    ) -> tuple[Sequence[PreferenceExample], Sequence[PreferenceExample]]:
        cache = self.config.reference_cache or (f"{folder}/reference" if folder else "")
        return self._with_reference(train, cache), self._with_reference(validation, cache)

    def _with_reference(
        self, examples: Sequence[PreferenceExample], cache: str
    ) -> Sequence[PreferenceExample]:
        self._check_kind(examples)
        labelled = [e for e in examples if isinstance(e, LabelledExample)]
        if labelled:
            examples = with_others(labelled)
        if not examples or not uses_reference(self.config) or self.config.reference == "live":
            return examples
        name = self._cache_name(examples)
        known = _read_cache(cache, name, 2 * len(examples))
        if known is None:
            if self._trained and not done(self._ranks.has_adapters()):
                raise ConfigError(
                    "this trainer's model has been trained, and the reference is the one that it "
                    "started from; make a new trainer, or set preference.reference=live"
                )
            known = self._response_log_probs(examples, reference=True)
            if cache:
                _write_cache(cache, name, known)
        pairs = known.view(-1, 2).tolist()
        return [
            replace(example, reference=(first, second))
            for example, (first, second) in zip(examples, pairs, strict=True)
        ]

    def _check_kind(self, examples: Sequence[PreferenceExample]) -> None:
        labelled = self.config.loss == "kto"
        what = "completions with a label" if labelled else "pairs of a chosen and a rejected one"
        if any(isinstance(example, LabelledExample) != labelled for example in examples):
            kind = "labels" if labelled else "pairs"
            raise DataError(
                f"preference.loss={self.config.loss} learns from {what}; read the rows as "
                f'kind="{kind}"'
            )

    def _cache_name(self, examples: Sequence[PreferenceExample]) -> str:
        """The file for log-probs of these examples under the weights that training starts from."""
        fingerprint = done(self._ranks.start_fingerprint())
        dtype = self.config.parallel.compute_dtype
        text = "\0".join([self.start, fingerprint, str(dtype), examples_digest(examples)])
        return f"{hashlib.sha256(text.encode()).hexdigest()}.safetensors"

    def _response_log_probs(
        self, examples: Sequence[PreferenceExample], *, reference: bool
    ) -> Tensor:
        """Log-probs `[2N]` (float32) of the examples' responses."""
        parts = []
        for batch in self._chunks(examples):
            tokens = batch.select(["input_ids", "attention_mask", "responses", "response_mask"])
            parts.append(done(self._ranks.response_log_probs(tokens, reference)))
        return torch.cat([part["response_log_probs"] for part in parts])

    def _collate(self, examples: Sequence[PreferenceExample]) -> Batch:
        return collate_preferences(examples, self.pad_token_id)

    def _update(self, batch: Batch) -> dict[str, float]:
        self._trained = True
        return super()._update(batch)

    def validate(self, examples: Sequence[PreferenceExample]) -> dict[str, float]:
        """The loss of held-out examples and its metrics, as those of a step."""
        policy, reference = self._response_log_probs(examples, reference=False), None
        if uses_reference(self.config):
            known = [e.reference for e in examples if e.reference is not None]
            reference = (
                torch.tensor(known).flatten()
                if len(known) == len(examples)
                else self._response_log_probs(examples, reference=True)
            )
        out = self._loss(examples, policy.double(), reference)
        return {"loss": float(out.loss.mean())} | compute_means(out.metrics)

    def _loss(
        self, examples: Sequence[PreferenceExample], policy: Tensor, reference: Tensor | None
    ) -> preference_losses.PreferenceOutput:
        if self.config.loss != "kto":
            lengths = [len(ids) for example in examples for ids in example.responses]
            pairs = as_pairs(policy, torch.tensor(lengths).to(policy.dtype), reference)
            options = preference_options(self.config, "preference")
            return preference_losses.get_pair_loss(self.config.loss)(pairs, **options)
        assert reference is not None
        reference = reference.double()
        labels = torch.tensor([isinstance(e, LabelledExample) and e.label for e in examples])
        point = preference_losses.kto_reference_point(policy[1::2], reference[1::2])
        return preference_losses.kto(
            policy[0::2], reference[0::2], labels, point, **kto_options(self.config)
        )


def _read_cache(folder: str, name: str, rows: int) -> Tensor | None:
    """Log-probs `[rows]` that an earlier run kept; None where there are none that can be read."""
    if not folder:
        return None
    try:
        log_probs = load(Files(folder).read(name))["log_probs"]
    except (OSError, SafetensorError, KeyError):
        return None
    return log_probs if log_probs.shape == (rows,) else None


def _write_cache(folder: str, name: str, log_probs: Tensor) -> None:
    try:
        Files(folder).write(name, save({"log_probs": log_probs.contiguous()}))
    except (OSError, StorageError) as error:
        log.warning("the reference's log-probs are not kept in %s: %s", folder, error)


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
    gaps = chosen - rejected
    means = {"margin": float(gaps.mean()), "calibration_error": calibration_error(gaps)}
    return {"loss": float(out.loss.mean())} | _accuracy(chosen > rejected) | means


def _accuracy(right: Tensor) -> dict[str, float]:
    interval = mean_interval(right.double().numpy(), 0.95)
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
    """Settings of a preference loss whose messages and metrics name the reward model."""

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
        """The scores `[steps]` (float32) of each example's steps; right ones are above 0."""
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
