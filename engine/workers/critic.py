"""The critic: values of the states along a completion, and their update."""

from __future__ import annotations

from typing import Any

import torch

from engine.algorithms.aggregation import Denominators, aggregate
from engine.algorithms.metrics import Sum, finish, merge
from engine.algorithms.values import value_loss
from engine.batch import TOKENS, Batch
from engine.config import CriticConfig
from engine.models import create_critic_model, load_model
from engine.models.forward import response_values
from engine.workers.base import Dispatch, WorkerContext, dispatch
from engine.workers.micro import micro_batches
from engine.workers.optim import Optimizer
from engine.workers.state import StatefulWorker, load_trained_state, trained_state


class CriticWorker(StatefulWorker):
    """Trains a value model that starts from the warm start's backbone."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        config: CriticConfig,
        total_steps: int,
        seed: int,
        dtype: str = "float32",
    ) -> None:
        super().__init__(context)
        self.config = config
        self.model = create_critic_model(load_model(model_path, dtype)).eval()  # no dropout
        self.optimizer = Optimizer(self.model, config.optim, total_steps)
        self.generator = torch.Generator().manual_seed(seed)

    @dispatch(Dispatch.DATA_PARALLEL, reads=TOKENS, gives=("values",))
    def values(self, batch: Batch) -> Batch:
        """`values [B, R]` of the states before each response token."""
        out = torch.zeros(batch["responses"].shape)
        with torch.no_grad():
            for rows, micro in micro_batches(batch, self.config.max_tokens_per_micro_batch):
                out[rows, : micro["responses"].shape[1]] = response_values(self.model, micro)
        return Batch({"values": out})

    @dispatch(Dispatch.DATA_PARALLEL_METRICS)
    def update(self, batch: Batch) -> dict[str, float]:
        """Fit `returns [B, R]` from `values [B, R]`, clipped around the old values."""
        parts, norms = [], []
        for _ in range(self.config.ppo_epochs):
            size = self.config.ppo_mini_batch_size or len(batch)
            for mini in batch.minibatches(size, self.generator if size < len(batch) else None):
                parts.append(self._accumulate(mini))
                norms.append(self.optimizer.step())
        metrics = {f"critic/{k}": v for k, v in finish(merge(parts)).items()}
        return metrics | {"critic/grad_norm": sum(norms) / len(norms)}

    def _accumulate(self, mini: Batch) -> dict[str, Sum]:
        denominators = Denominators.from_mask(mini["response_mask"])
        parts = []
        for _, micro in micro_batches(mini, self.config.max_tokens_per_micro_batch):
            out = value_loss(
                response_values(self.model, micro),
                micro["values"],
                micro["returns"],
                micro["response_mask"],
                cliprange_value=self.config.cliprange_value,
            )
            aggregate(out.loss, micro["response_mask"], "token-mean", denominators).backward()
            parts.append(dict(out.metrics))
        return merge(parts)

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and the generator that shuffles mini-batches."""
        return trained_state(self.model, self.optimizer, self.generator)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        load_trained_state(state, self.model, self.optimizer, self.generator)
