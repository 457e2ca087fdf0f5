"""The roles that learn from rows: warm start, preferences, reward models, step rewards."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from engine import models
from engine.algorithms import preference_losses
from engine.algorithms.aggregation import accumulate_mean
from engine.batch import Batch
from engine.checkpoint.format import RankState, read_controller_state
from engine.checkpoint.state_dict import BOXES
from engine.config import OfflineConfig, PreferenceTrainingConfig, RewardModelTrainingConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, ModelError
from engine.models.forward import LogProbReader, OutputReader, Outputs, ValueReader
from engine.models.value_head import classifier_of, classifier_tensors, save_adapted
from engine.parallel.layout import DATA_AXES, Layout
from engine.runtime.policy_runtime import (
    PolicyRuntime,
    StartModel,
    load_opened,
    save_ranks,
    saved_tokenizer,
)
from engine.runtime.sharded_model import Metrics, ShardedModel, init_mesh
from engine.runtime.train_state import ShardedTrainState, weights_fingerprint
from engine.workers.actor import TrainingWorker
from engine.workers.algorithm_options import kto_options, preference_options
from engine.workers.role import Dispatch, WorkerContext, dispatch


class OfflineWorker(TrainingWorker):
    """A model in training on rows; a single rank may be given it, and trains in place."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model: PreTrainedModel | StartModel,
        config: OfflineConfig,
        seed: int,
    ) -> None:
        super().__init__(context)
        self.config, self.seed = config, seed
        parallel = config.parallel.model_copy(update={"packing": config.packing})
        layout = Layout.of(parallel)
        ranks = init_mesh(layout, context.rank, context.world_size, context.address)
        self._start_model = model if isinstance(model, StartModel) else None
        self.policy = PolicyRuntime(self._open(model), ranks, parallel)
        self.sharded = self.policy.sharded

    def _open(
        self, model: PreTrainedModel | StartModel
    ) -> PreTrainedModel | models.CriticModel | models.UnloadedModel:
        return model.open() if isinstance(model, StartModel) else model

    @dispatch(Dispatch.ONE_TO_ALL)
    def begin(self, total_steps: int) -> None:
        """Make the optimizer of a run of so many steps; dropout draws from the seed."""
        torch.manual_seed(self.seed + self.sharded.ranks.index(*DATA_AXES))
        self.sharded.module.train()
        optim = self.config.optim
        self.train_state = ShardedTrainState(self.sharded, optim, total_steps, self.seed)

    @dispatch(Dispatch.ONE_TO_ALL)
    def save(self, folder: str, tokenizer: str) -> str:
        """Write model, adapters and the tokenizer in `tokenizer` as a Hugging Face folder."""
        if self._start_model is None:
            module = self.sharded.module
            models.save_model(module, saved_tokenizer(tokenizer, module), folder)
        else:
            save_ranks(self.policy, replace(self._start_model, tokenizer=tokenizer), Path(folder))
        return folder

    def read_saved(self, folder: str) -> list[RankState]:
        alone = read_controller_state(folder)
        return [alone] if BOXES in alone.values else super().read_saved(folder)

    def _reader(self) -> LogProbReader:
        return LogProbReader(1.0, statistics=self.sharded.statistics())

    def _step(self, parts: list[Metrics]) -> dict[str, float]:
        """Take an optimizer step; return its metrics and the micro-batches'."""
        optimizer = self.train_state.optimizer
        return self.finish_update(parts, [optimizer.step()]) | {"lr": optimizer.lr}

    def _read(
        self, batch: Batch, reader: OutputReader, other: ShardedModel | None = None
    ) -> Outputs:
        """What is read of the model's outputs, or of another's, without dropout."""
        training, budget = self.sharded.module.training, self.config.max_tokens_per_micro_batch
        self.sharded.module.eval()
        outputs = (other or self.sharded).read(batch, budget, reader)
        self.sharded.module.train(training)
        return outputs


class SFTWorker(OfflineWorker):
    @dispatch(Dispatch.DATA_PARALLEL_METRICS, pad=True)
    def update(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on the mean loss (nats) over all ranks' response tokens."""
        tokens = self.sharded.global_counts(batch["response_mask"]).tokens

        def loss(outputs: Outputs, micro: Batch) -> tuple[Tensor, Metrics]:
            log_probs, mask = outputs["log_probs"], micro["response_mask"]
            return -(log_probs * mask).sum() / tokens, {"loss": accumulate_mean(-log_probs, mask)}

        return self._step(self.accumulate_rows(batch, self._reader(), loss))

    @dispatch(Dispatch.DATA_PARALLEL_METRICS, pad=True)
    def validation_loss(self, batch: Batch) -> dict[str, float]:
        """The mean in nats over all ranks' response tokens, without dropout."""
        log_probs = self._read(batch, self._reader())["log_probs"]
        total = -(log_probs * batch["response_mask"]).sum(dtype=torch.float64)
        tokens = self.sharded.global_counts(batch["response_mask"]).tokens
        ranks, local = self.sharded.ranks, total.to(self.sharded.device)
        return {"validation_loss": float(ranks.sum_over(local, DATA_AXES)) / tokens}


class PreferenceWorker(OfflineWorker):
    """Trains a policy on preferences, against the model that it starts from.

    Rows come two by two: the chosen and the rejected response of a prompt, or for KTO a completion
    and one of another prompt, from which the reference point is estimated.
    """

    config: PreferenceTrainingConfig

    def __init__(
        self, context: WorkerContext, *, config: PreferenceTrainingConfig, **options: Any
    ) -> None:
        self._frozen: Any = None  # a copy of the start model, for a live reference
        self._live = config.reference == "live" and uses_reference(config)
        super().__init__(context, config=config, **options)
        self._reference: ShardedModel | None = None  # None: the policy, before it is trained
        if models.has_adapters(self.sharded.module):
            self._reference = self.sharded.without_adapters()
        elif self._frozen is not None:
            ranks, parallel = self.sharded.ranks, self.sharded.config
            self._reference = ShardedModel(self._frozen, ranks, parallel)

    def _open(
        self, model: PreTrainedModel | StartModel
    ) -> PreTrainedModel | models.CriticModel | models.UnloadedModel:
        opened: Any = super()._open(model)
        self._fingerprint = weights_fingerprint(opened)
        if self._live and not models.has_adapters(getattr(opened, "module", opened)):
            again = super()._open(model) if isinstance(model, StartModel) else copy.deepcopy(model)
            self._frozen = again.eval() if isinstance(again, PreTrainedModel) else again
            self._frozen.requires_grad_(False)
        return opened

    @dispatch(Dispatch.RANK_ZERO)
    def start_fingerprint(self) -> str:
        """A digest of a few values of each weight that training starts from, but for adapters."""
        return self._fingerprint

    @dispatch(Dispatch.RANK_ZERO)
    def has_adapters(self) -> bool:
        """Whether adapters are trained, and the reference is the model without them."""
        return models.has_adapters(self.sharded.module)

    @dispatch(Dispatch.DATA_PARALLEL, unit=2, pad=True)
    def response_log_probs(self, batch: Batch, reference: bool) -> Batch:
        """`response_log_probs [B]`: of whole responses, of the policy or of the reference."""
        log_probs = self._log_probs(batch, self._reference if reference else None)
        return Batch({"response_log_probs": log_probs})

    @dispatch(Dispatch.DATA_PARALLEL_METRICS, unit=2, pad=True)
    def update(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on the mean loss over the pairs, or the rows, of all ranks.

        Reads `ref_response_log_probs [B]`, where the loss has a reference that isn't live, and for
        KTO `desirable [B]` bool: its rows 2i+1 are completions of other prompts.
        """
        if self._live:
            ref = self._log_probs(batch, self._reference)
            batch = batch | {"ref_response_log_probs": ref}
        if self.config.loss != "kto":
            options = preference_options(self.config, "preference")
            pair_loss = partial(preference_losses.get_pair_loss(self.config.loss), **options)
            return self._step(self.accumulate_pairs(batch, pair_loss, self._reader()))
        point = self._reference_point(batch.rows(slice(1, None, 2)))
        options = kto_options(self.config)

        def loss(outputs: Outputs, micro: Batch) -> preference_losses.PreferenceOutput:
            policy, _ = preference_losses.sequence_log_probs(
                outputs["log_probs"], micro["response_mask"]
            )
            reference = micro["ref_response_log_probs"]
            return preference_losses.kto(policy, reference, micro["desirable"], point, **options)

        rows = batch.rows(slice(0, None, 2))
        parts = self.accumulate_responses(rows, loss, self._reader(), unit=1)
        return self._step(parts) | {"kl": point}

    def _reference_point(self, others: Batch) -> float:
        """KTO's z₀: max(0, mean of log π − log π_ref over all ranks' rows)."""
        real = others["response_mask"].bool().any(1)
        gap = self._log_probs(others, None).double() - others["ref_response_log_probs"].double()
        sums = torch.stack([gap[real].sum(), real.sum().double()]).to(self.sharded.device)
        total, count = self.sharded.ranks.sum_over(sums, DATA_AXES).tolist()
        return max(0.0, total / count)

    def _log_probs(self, batch: Batch, model: ShardedModel | None) -> Tensor:
        """Log-probs `[B]` (float32) of whole responses, without dropout; None: the policy's."""
        log_probs = self._read(batch, self._reader(), model)["log_probs"]
        return preference_losses.sequence_log_probs(log_probs, batch["response_mask"])[0].float()


def uses_reference(config: PreferenceTrainingConfig) -> bool:
    return config.loss == "kto" or preference_losses.get_pair_loss(config.loss).needs_reference


class RewardModelWorker(OfflineWorker):
    """Trains a reward model that starts from a language model's backbone.

    Rows come two by two, the chosen and the rejected conversation of a prompt. Each ends in one
    token more than the model reads; the value before it is the conversation's score.
    """

    config: RewardModelTrainingConfig
    of_tokens = False  # a score for each step, not for the whole

    def _open(
        self, model: PreTrainedModel | StartModel
    ) -> models.CriticModel | models.UnloadedModel:
        opened: models.CriticModel | models.UnloadedModel
        if isinstance(model, StartModel):
            if model.lora is not None and (model.lora.from_folder or model.lora.quantize):
                raise ConfigError(
                    "model.lora.from_folder and model.lora.quantize are a policy's; a reward model "
                    "has new adapters (model.lora.rank) on its base, in its own precision"
                )
            opened = self._open_critic(model)
        else:
            opened = models.create_critic_model(model)
        critic = opened.module if isinstance(opened, models.UnloadedModel) else opened
        critic.head.bias.requires_grad_(self.of_tokens)  # of sequences a classifier has none
        self._start_config = critic.config
        self._classifier(critic.head.weight.dtype, 0)  # or it could not be saved
        return opened

    @dispatch(Dispatch.DATA_PARALLEL, unit=2, pad=True)
    def scores(self, batch: Batch) -> Batch:
        """`scores [B]` of conversations, without dropout."""
        return Batch({"scores": _last(self._values(batch), batch)})

    def _values(self, batch: Batch) -> Tensor:
        return self._read(batch, ValueReader())["values"]

    @dispatch(Dispatch.DATA_PARALLEL_METRICS, unit=2, pad=True)
    def update(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on the mean loss over all ranks' pairs; reads `margin [B]`."""
        center = self.config.center_rewards_coefficient

        def loss(outputs: Outputs, micro: Batch) -> preference_losses.PreferenceOutput:
            scores, margin = _last(outputs["values"], micro), micro["margin"][0::2]
            return preference_losses.bradley_terry(
                scores[0::2], scores[1::2], margin, center_rewards_coefficient=center
            )

        return self._step(self.accumulate_responses(batch, loss, ValueReader(), unit=2))

    @dispatch(Dispatch.ONE_TO_ALL)
    def save(self, folder: str, tokenizer: str) -> str:
        """Write a sequence-classification folder, with the tokenizer in `tokenizer`."""
        saved_tokenizer = load_tokenizer(tokenizer)
        if saved_tokenizer.pad_token_id is None:
            raise ModelError(
                f"the tokenizer in {tokenizer} has neither a pad nor an end token; set one"
            )
        saved_tokenizer.padding_side = "right"  # positions begin with the conversation
        dtype = next(self.sharded.module.parameters()).dtype
        model = self._classifier(dtype, saved_tokenizer.pad_token_id)
        if models.has_adapters(self.sharded.module):
            critic = self.policy.full_model(self._load_critic)
            if critic is not None:
                save_adapted(model, critic, saved_tokenizer, Path(folder))
            return folder

        def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
            models.save_tensors(
                model, classifier_tensors(model, tensors), saved_tokenizer, Path(folder)
            )

        self.policy.write_full(write)
        return folder

    def _classifier(self, dtype: torch.dtype, pad_token_id: int) -> PreTrainedModel:
        return classifier_of(self._start_config, dtype, pad_token_id, of_tokens=self.of_tokens)

    def _open_critic(self, start: StartModel) -> models.CriticModel | models.UnloadedModel:
        return models.open_critic_model(
            start.path, start.dtype, start.lora, start.seed, "model.lora"
        )

    def _load_critic(self) -> Any:
        assert self._start_model is not None, "ranks load their model"
        return load_opened(self._open_critic(self._start_model), torch.device("cpu"))


def _last(values: Tensor, batch: Batch) -> Tensor:
    return preference_losses.sequence_log_probs(values, batch["response_mask"])[0]


class ProcessRewardWorker(RewardModelWorker):
    """Trains a token classifier, on rows of `collate_steps`: σ(score) is that of a right step."""

    of_tokens = True

    @dispatch(Dispatch.DATA_PARALLEL, pad=True)
    def step_scores(self, batch: Batch) -> Batch:
        """`values [B, R]`, 0 where no step ends, without dropout."""
        return Batch({"values": self._values(batch) * batch["response_mask"]})

    @dispatch(Dispatch.DATA_PARALLEL_METRICS, pad=True)
    def update_steps(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on the mean cross-entropy over the steps of all ranks."""
        steps = self.sharded.global_counts(batch["response_mask"]).tokens

        def loss(outputs: Outputs, micro: Batch) -> tuple[Tensor, Metrics]:
            mask, labels, values = micro["response_mask"], micro["step_labels"], outputs["values"]
            losses = F.binary_cross_entropy_with_logits(values, labels, reduction="none")
            right = ((values > 0) == labels.bool()).double()
            metrics = {"loss": losses, "accuracy": right, "scores": torch.sigmoid(values)}
            named = {name: accumulate_mean(value.detach(), mask) for name, value in metrics.items()}
            return (losses * mask).sum() / steps, named

        return self._step(self.accumulate_rows(batch, ValueReader(), loss))

    def _classifier(self, dtype: torch.dtype, pad_token_id: int) -> PreTrainedModel:
        model = super()._classifier(dtype, pad_token_id)
        model.config.step_separator = self.config.step_separator
        return model
