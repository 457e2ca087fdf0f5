"""The role of the warm start: a model's loss on the responses of its rows, and its updates.

Rows of prompt and response come as batches; `engine.trainers.sft` draws them. `OfflineWorker` is
what other roles that learn from rows of a dataset have in common with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.algorithms.metrics import accumulate_mean, compute_means
from engine.batch import Batch
from engine.checkpoint.dcp_metadata import BOXES
from engine.checkpoint.rank_state import RankState, read_controller_state
from engine.config import OfflineConfig
from engine.data.tokenizer import load_tokenizer
from engine.models import CriticModel, UnloadedModel, save_model
from engine.parallel.layout import DATA_AXES, Layout
from engine.runtime.loss_scale import update_metrics
from engine.runtime.policy_runtime import PolicyRuntime
from engine.runtime.save_policy import StartModel, save_ranks
from engine.runtime.sharded_model import Metrics, init_mesh
from engine.runtime.sharded_train_state import ShardedTrainState
from engine.runtime.token_outputs import LogProbReader, Outputs
from engine.workers.base import Dispatch, WorkerContext, dispatch
from engine.workers.stateful import TrainingWorker


class OfflineWorker(TrainingWorker):
    """A model in training on rows of a dataset.

    On a single rank it may be given the model itself, which it trains in place; ranks of a layout
    each load what they keep of a `StartModel`.
    """

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
    ) -> PreTrainedModel | CriticModel | UnloadedModel:
        """The model to train, to be loaded by the ranks that keep it where that can be."""
        return model.open() if isinstance(model, StartModel) else model

    @dispatch(Dispatch.ONE_TO_ALL)
    def begin(self, total_steps: int) -> None:
        """Make the optimizer of a run of so many steps.

        Dropout, where the model has any, draws from the seed, on each data-parallel rank another.
        """
        torch.manual_seed(self.seed + self.sharded.ranks.index(*DATA_AXES))
        self.sharded.module.train()
        optim = self.config.optim
        self.train_state = ShardedTrainState(self.sharded, optim, total_steps, self.seed)

    @dispatch(Dispatch.ONE_TO_ALL)
    def save(self, folder: str, tokenizer: str) -> str:
        """Write the model, its adapters and the tokenizer in `tokenizer` as a Hugging Face
        folder."""
        if self._start_model is None:
            save_model(self.sharded.module, load_tokenizer(tokenizer), folder)
        else:
            save_ranks(self.policy, replace(self._start_model, tokenizer=tokenizer), Path(folder))
        return folder

    def read_saved(self, folder: str) -> list[RankState]:
        """Of a run in one process as well, whose state is the controller's."""
        alone = read_controller_state(folder)
        return [alone] if BOXES in alone.values else super().read_saved(folder)

    def _passes(self, batch: Batch) -> list[tuple[Tensor, Batch]]:
        return self.sharded.micro_batches(batch, self.config.max_tokens_per_micro_batch)

    def _reader(self) -> LogProbReader:
        return LogProbReader(1.0, statistics=self.sharded.statistics())

    def _step(self, parts: list[Metrics]) -> dict[str, float]:
        """Take an optimizer step; return the micro-batches' metrics, `lr`, `grad_norm` and, of
        float16 weights, their loss scale."""
        metrics = compute_means(self.sharded.all_reduce_metrics(parts))
        optimizer = self.train_state.optimizer
        metrics |= update_metrics([optimizer.step()], optimizer.loss_scale)
        return metrics | {"lr": optimizer.lr}

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        training = self.sharded.module.training
        self.sharded.module.eval()
        yield
        self.sharded.module.train(training)


class SFTWorker(OfflineWorker):
    """Fine-tunes a model on rows of prompt and response."""

    @dispatch(Dispatch.DATA_PARALLEL_METRICS, pad=True)
    def update(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on the mean loss over the response tokens of all ranks.

        Returns `loss` (nats a token), `lr`, `grad_norm` and, of float16 weights, their loss scale.
        """
        tokens = self.sharded.global_counts(batch["response_mask"]).tokens

        def loss(got: Outputs, micro: Batch) -> tuple[Tensor, Metrics]:
            mask = micro["response_mask"]
            value = -(got["log_probs"] * mask).sum()
            return value / tokens, {"loss": accumulate_mean(-got["log_probs"], mask)}

        micros = [micro for _, micro in self._passes(batch)]
        return self._step(self.sharded.accumulate(batch, micros, self._reader(), loss))

    @dispatch(Dispatch.DATA_PARALLEL_METRICS, pad=True)
    def validation_loss(self, batch: Batch) -> dict[str, float]:
        """`validation_loss`: the mean in nats over all ranks' response tokens, without dropout."""
        passes = self._passes(batch)
        with self._without_dropout():
            log_probs = self.sharded.outputs(batch, passes, self._reader())["log_probs"]
        total = 0.0
        for rows, micro in passes:
            mask = micro["response_mask"]
            total -= float((log_probs[rows, : mask.shape[1]] * mask).sum())
        own = torch.tensor(total, dtype=torch.float64, device=self.sharded.device)
        tokens = self.sharded.global_counts(batch["response_mask"]).tokens
        return {"validation_loss": float(self.sharded.ranks.sum_over(own, DATA_AXES)) / tokens}
