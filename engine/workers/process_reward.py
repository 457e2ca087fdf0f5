"""The role of training on steps: a score for each step of a response, right or wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from engine.algorithms.metrics import accumulate_mean
from engine.batch import Batch
from engine.runtime.sharded_model import Metrics
from engine.runtime.token_outputs import Outputs, ValueReader
from engine.workers.base import Dispatch, dispatch
from engine.workers.reward_model import RewardModelWorker


class ProcessRewardWorker(RewardModelWorker):
    """Trains a token classifier of one label: σ(score) is the probability that a step is right.

    Rows are of `collate_steps`: values before the tokens of `response_mask` are steps' scores.
    """

    of_tokens = True

    @dispatch(Dispatch.DATA_PARALLEL, pad=True)
    def step_scores(self, batch: Batch) -> Batch:
        """`values [B, R]`, 0 where no step ends, without dropout."""
        with self._without_dropout():
            values = self.sharded.outputs(batch, self._passes(batch), ValueReader())["values"]
        return Batch({"values": values * batch["response_mask"]})

    @dispatch(Dispatch.DATA_PARALLEL_METRICS, pad=True)
    def update_steps(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on the mean cross-entropy over the steps of all ranks."""
        steps = self.sharded.global_counts(batch["response_mask"]).tokens

        def loss(got: Outputs, micro: Batch) -> tuple[Tensor, Metrics]:
            mask, labels, values = micro["response_mask"], micro["step_labels"], got["values"]
            each = F.binary_cross_entropy_with_logits(values, labels, reduction="none")
            right = ((values > 0) == labels.bool()).double()
            metrics = {"loss": each.detach(), "accuracy": right, "scores": torch.sigmoid(values)}
            total = (each * mask).sum() / steps
            return total, {n: accumulate_mean(x.detach(), mask) for n, x in metrics.items()}

        micros = [micro for _, micro in self._passes(batch)]
        return self._step(self.sharded.accumulate(batch, micros, ValueReader(), loss))

    def _classifier(self, dtype: torch.dtype, pad_token_id: int) -> PreTrainedModel:
        model = super()._classifier(dtype, pad_token_id)
        model.config.step_separator = self.config.step_separator
        return model
