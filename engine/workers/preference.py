"""The role of preference learning: a policy's losses on pairs, or on single rows with labels.

Rows come two by two: the chosen and the rejected response of a prompt, or for KTO a completion and
one of another prompt, from which the reference point is estimated. `engine.trainers.preference`
draws them.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.algorithms.preference import (
    PreferenceOutput,
    get_pair_loss,
    kto,
    sequence_log_probs,
)
from engine.batch import Batch
from engine.config import PreferenceTrainingConfig
from engine.models import CriticModel, UnloadedModel, has_adapters
from engine.parallel.layout import DATA_AXES
from engine.runtime.pair_gradients import accumulate_pairs, accumulate_responses
from engine.runtime.save_policy import StartModel
from engine.runtime.sharded_model import ShardedModel
from engine.runtime.sharded_train_state import weights_fingerprint
from engine.runtime.token_outputs import Outputs
from engine.workers.algorithm_options import kto_options, preference_options
from engine.workers.base import Dispatch, WorkerContext, dispatch
from engine.workers.sft import OfflineWorker


class PreferenceWorker(OfflineWorker):
    """Trains a policy on preferences, against the model that it starts from."""

    config: PreferenceTrainingConfig

    def __init__(
        self,
        context: WorkerContext,
        *,
        model: PreTrainedModel | StartModel,
        config: PreferenceTrainingConfig,
        seed: int,
    ) -> None:
        self._frozen: Any = None  # a copy of the start model, for a live reference
        super().__init__(context, model=model, config=config, seed=seed)
        self._live = config.reference == "live" and uses_reference(config)
        self._reference: ShardedModel | None = None  # None: the policy, before it is trained
        if has_adapters(self.sharded.module):
            self._reference = self.sharded.without_adapters()
        elif self._frozen is not None:
            parallel = self.sharded.config
            self._reference = ShardedModel(self._frozen, self.sharded.ranks, parallel)

    def _open(
        self, model: PreTrainedModel | StartModel
    ) -> PreTrainedModel | CriticModel | UnloadedModel:
        opened = super()._open(model)
        self._fingerprint = weights_fingerprint(opened)
        own: Any = opened
        if (
            self.config.reference == "live"
            and uses_reference(self.config)
            and not has_adapters(getattr(own, "module", own))
        ):
            again = super()._open(model) if isinstance(model, StartModel) else copy.deepcopy(model)
            self._frozen = again.eval() if isinstance(again, PreTrainedModel) else again
            self._frozen.requires_grad_(False)
        return opened

    @dispatch(Dispatch.RANK_ZERO)
    def start_fingerprint(self) -> str:
        """A digest of a few values of each weight that training starts from, adapters left out."""
        return self._fingerprint

    @dispatch(Dispatch.RANK_ZERO)
    def has_adapters(self) -> bool:
        """Whether adapters are trained, and the reference is the model without them."""
        return has_adapters(self.sharded.module)

    @dispatch(Dispatch.DATA_PARALLEL, unit=2, pad=True)
    def response_log_probs(self, batch: Batch, reference: bool) -> Batch:
        """`response_log_probs [B]`: of whole responses, of the policy or of the reference."""
        found = self._log_probs(batch, self._reference if reference else None)
        return Batch({"response_log_probs": found})

    @dispatch(Dispatch.DATA_PARALLEL_METRICS, unit=2, pad=True)
    def update(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on the mean loss over the pairs, or the rows, of all ranks.

        Reads `ref_response_log_probs [B]`, where the loss has a reference that isn't live, and for
        KTO `desirable [B]` bool.
        """
        if self._live:
            ref = self._log_probs(batch, self._reference)
            batch = batch | {"ref_response_log_probs": ref}
        budget = self.config.max_tokens_per_micro_batch
        if self.config.loss == "kto":
            return self._update_kto(batch, budget)
        options = preference_options(self.config, "preference")
        pair_loss = partial(get_pair_loss(self.config.loss), **options)
        return self._step(accumulate_pairs(self.sharded, batch, pair_loss, self._reader(), budget))

    def _update_kto(self, batch: Batch, budget: int) -> dict[str, float]:
        """Rows 2i are completions of their prompts, rows 2i+1 those of other ones."""
        point = self._reference_point(batch.rows(slice(1, None, 2)))
        options = kto_options(self.config)

        def loss(got: Outputs, micro: Batch) -> PreferenceOutput:
            policy, _ = sequence_log_probs(got["log_probs"], micro["response_mask"])
            reference = micro["ref_response_log_probs"]
            return kto(policy, reference, micro["desirable"], point, **options)

        rows = batch.rows(slice(0, None, 2))
        parts = accumulate_responses(self.sharded, rows, loss, self._reader(), budget, unit=1)
        return self._step(parts) | {"kl": point}

    def _reference_point(self, others: Batch) -> float:
        """KTO's z₀: max(0, mean of log π − log π_ref over all ranks' rows)."""
        real = others["response_mask"].bool().any(1)
        gap = self._log_probs(others, None).double() - others["ref_response_log_probs"].double()
        own = torch.stack([gap[real].sum(), real.sum().double()]).to(self.sharded.device)
        total, count = self.sharded.ranks.sum_over(own, DATA_AXES).tolist()
        return max(0.0, total / count)

    def _log_probs(self, batch: Batch, model: ShardedModel | None) -> Tensor:
        """Log-probs `[B]` (float32) of whole responses, without dropout; None: the policy's."""
        sharded, budget = model or self.sharded, self.config.max_tokens_per_micro_batch
        with self._without_dropout():
            passes = sharded.micro_batches(batch, budget)
            log_probs = sharded.outputs(batch, passes, self._reader())["log_probs"]
        return sequence_log_probs(log_probs, batch["response_mask"])[0].float()


def uses_reference(config: PreferenceTrainingConfig) -> bool:
    """Whether the loss compares with a reference."""
    return config.loss == "kto" or get_pair_loss(config.loss).needs_reference
