"""Preference learning, offline: DPO and its relatives on pairs, KTO on labelled completions."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from engine.algorithms import preference_losses
from engine.algorithms.aggregation import compute_means
from engine.batch import Batch
from engine.config import PreferenceTrainingConfig
from engine.data.training_examples import (
    LabelledExample,
    PreferenceExample,
    collate_preferences,
    examples_digest,
    with_others,
)
from engine.errors import ConfigError, DataError, StorageError
from engine.storage.filesystem import Files
from engine.trainers.offline import OfflineTrainer, done
from engine.workers.actor import as_pairs
from engine.workers.algorithm_options import (
    check_preference_training,
    kto_options,
    preference_options,
)
from engine.workers.supervised import PreferenceWorker, uses_reference

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
        if any(isinstance(example, LabelledExample) != labelled for example in examples):
            what = (
                "completions with a label" if labelled else "pairs of a chosen and a rejected one"
            )
            kind = "labels" if labelled else "pairs"
            raise DataError(
                f"preference.loss={self.config.loss} learns from {what}; read the rows as "
                f'kind="{kind}"'
            )

    def _cache_name(self, examples: Sequence[PreferenceExample]) -> str:
        """Of the weights that training starts from, as they are computed with, and the examples."""
        fingerprint, dtype = (
            done(self._ranks.start_fingerprint()),
            self.config.parallel.compute_dtype,
        )
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
