"""The role of reward-model training: scores of conversations, and updates on pairs of them.

Rows come two by two, the chosen and the rejected conversation of a prompt. Each ends in one token
more than the model reads; the value before it is the conversation's score.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.algorithms.preference import PreferenceOutput, bradley_terry, sequence_log_probs
from engine.batch import Batch
from engine.config import RewardModelTrainingConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, ModelError
from engine.models import (
    CriticModel,
    UnloadedModel,
    create_critic_model,
    has_adapters,
    open_critic_model,
    save_tensors,
)
from engine.models.classifier import classifier_of, classifier_tensors, save_adapted
from engine.parallel.gather import named_tensors
from engine.runtime.load_shards import load_shards
from engine.runtime.pair_gradients import accumulate_responses
from engine.runtime.save_policy import StartModel
from engine.runtime.token_outputs import Outputs, ValueReader
from engine.workers.base import Dispatch, dispatch
from engine.workers.sft import OfflineWorker


class RewardModelWorker(OfflineWorker):
    """Trains a reward model that starts from a language model's backbone."""

    config: RewardModelTrainingConfig
    of_tokens = False  # a score for each step, not for the whole

    def _open(self, model: PreTrainedModel | StartModel) -> CriticModel | UnloadedModel:
        if isinstance(model, StartModel):
            if model.lora is not None and (model.lora.from_folder or model.lora.quantize):
                raise ConfigError(
                    "model.lora.from_folder and model.lora.quantize are a policy's; a reward model "
                    "has new adapters (model.lora.rank) on its base, in its own precision"
                )
            opened = self._open_critic(model)
        else:
            opened = create_critic_model(model)
        critic = opened.module if isinstance(opened, UnloadedModel) else opened
        critic.head.bias.requires_grad_(self.of_tokens)  # of sequences a classifier has none
        self._start_config = critic.config
        self._classifier(critic.head.weight.dtype, 0)  # or it could not be saved
        return opened

    @dispatch(Dispatch.DATA_PARALLEL, unit=2, pad=True)
    def scores(self, batch: Batch) -> Batch:
        """`scores [B]` of conversations, without dropout."""
        with self._without_dropout():
            values = self.sharded.outputs(batch, self._passes(batch), ValueReader())["values"]
        return Batch({"scores": _last(values, batch)})

    @dispatch(Dispatch.DATA_PARALLEL_METRICS, unit=2, pad=True)
    def update(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on the mean loss over the pairs of all ranks.

        Reads `margin [B]`, the same of a pair's two rows.
        """
        center = self.config.center_rewards_coefficient

        def loss(got: Outputs, micro: Batch) -> PreferenceOutput:
            scores, margin = _last(got["values"], micro), micro["margin"][0::2]
            return bradley_terry(
                scores[0::2], scores[1::2], margin, center_rewards_coefficient=center
            )

        budget = self.config.max_tokens_per_micro_batch
        parts = accumulate_responses(self.sharded, batch, loss, ValueReader(), budget, unit=2)
        return self._step(parts)

    @dispatch(Dispatch.ONE_TO_ALL)
    def save(self, folder: str, tokenizer: str) -> str:
        """Write a sequence-classification folder, with the tokenizer in `tokenizer`."""
        own = load_tokenizer(tokenizer)
        if own.pad_token_id is None:
            raise ModelError(
                f"the tokenizer in {tokenizer} has neither a pad nor an end token; set one"
            )
        own.padding_side = "right"  # positions begin with the conversation
        dtype = next(self.sharded.module.parameters()).dtype
        model = self._classifier(dtype, own.pad_token_id)
        if has_adapters(self.sharded.module):
            critic = self._whole_critic()
            if critic is not None:
                save_adapted(model, critic, own, Path(folder))
            return folder

        def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
            save_tensors(model, classifier_tensors(model, tensors), own, Path(folder))

        self.policy.write_full(write)
        return folder

    def _classifier(self, dtype: torch.dtype, pad_token_id: int) -> PreTrainedModel:
        return classifier_of(self._start_config, dtype, pad_token_id, of_tokens=self.of_tokens)

    def _open_critic(self, start: StartModel) -> CriticModel | UnloadedModel:
        return open_critic_model(start.path, start.dtype, start.lora, start.seed, "model.lora")

    @torch.no_grad()
    def _whole_critic(self) -> Any:
        """The critic with what was trained of it, on rank 0; None on others."""
        sharded, start = self.sharded, self._start_model
        if sharded.ranks.layout.world_size == 1:
            return sharded.module
        trained = sharded.full_tensors(lambda name: ".lora_" in name or name.startswith("head."))
        full = {name: tensor.to("cpu", copy=True) for name, tensor in trained}
        if sharded.ranks.rank:
            return None
        assert start is not None, "ranks load their model"
        opened = self._open_critic(start)
        critic = opened.module if isinstance(opened, UnloadedModel) else opened
        if isinstance(opened, UnloadedModel):
            cpu = torch.device("cpu")
            load_shards(critic, opened, cpu, cpu)
        for name, tensor in named_tensors(critic).items():
            if name in full:
                tensor.copy_(full[name])
        return critic


def _last(values: Tensor, batch: Batch) -> Tensor:
    """The value `[B]` at the one token that each row's mask names."""
    return sequence_log_probs(values, batch["response_mask"])[0]
