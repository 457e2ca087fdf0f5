"""The warm start: supervised fine-tuning on prompt/response pairs.

The loss is on response tokens only; micro-batches have rows of similar length within a token
budget, and their gradients add up to that of the whole batch. Of a model with adapters, on a
quantised base or not, only these are trained. The caller reads rows. The loop is in `offline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.batch import Batch
from engine.data.collate import collate_completions
from engine.trainers.offline import OfflineTrainer
from engine.trainers.offline_ranks import done
from engine.workers.sft import SFTWorker


@dataclass(frozen=True, slots=True)
class SFTExample:
    """One encoded pair."""

    prompt_ids: list[int]  # e.g. [2, 17, 9, 3]
    response_ids: list[int]  # ends with the end token, e.g. [21, 30, 1]


class SFTTrainer(OfflineTrainer[SFTExample, SFTWorker]):
    """Fine-tunes a model on pairs; see `OfflineTrainer`. Its configuration is an `SFTConfig`.

    Metrics of a step are `sft/loss` (mean negative log-likelihood a response token, nats),
    `sft/lr`, `sft/grad_norm`, `sft/tokens_per_s`, and, where one was taken, `sft/validation_loss`.
    """

    what = "the warm start"
    no_rows = "the warm start has no rows; check data.sft_size and the source"
    worker_class = SFTWorker

    def validation_loss(self, examples: Sequence[SFTExample]) -> float:
        """Mean negative log-likelihood a response token, in nats, without dropout."""
        return self._validate(examples)["validation_loss"]

    def _collate(self, examples: Sequence[SFTExample]) -> Batch:
        return collate_examples(examples, self.pad_token_id)

    def _update(self, batch: Batch) -> dict[str, float]:
        return done(self._ranks.update(batch))

    def _validate(self, examples: Sequence[SFTExample]) -> dict[str, float]:
        return done(self._ranks.validation_loss(self._collate(examples)))


def collate_examples(examples: Sequence[SFTExample], pad_token_id: int) -> Batch:
    """Lay pairs out as completions, their sampling log-probs being none (zeros)."""
    prompts = Batch(
        {"group_ids": torch.arange(len(examples))}, {"prompt_ids": [e.prompt_ids for e in examples]}
    )
    return collate_completions(
        prompts,
        range(len(examples)),
        [e.response_ids for e in examples],
        [[0.0] * len(e.response_ids) for e in examples],
        pad_token_id=pad_token_id,
    ).select(["input_ids", "attention_mask", "responses", "response_mask"])
