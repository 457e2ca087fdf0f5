"""The reference: the policy as it was before RL, frozen; or a teacher, which is as frozen.

Beside a policy with adapters the reference is that policy without them, and no copy is made.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from engine.batch import TOKENS, Batch
from engine.models import BaseOfPolicy, has_adapters, load_model
from engine.models.forward import response_log_probs, token_outputs
from engine.workers.base import Dispatch, Worker, WorkerContext, dispatch
from engine.workers.micro import micro_batches


class ReferenceWorker(Worker):
    """Gives the frozen model's log-probs. Shares the model with its process by the role's name."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        temperature: float,
        max_tokens_per_micro_batch: int,
        dtype: str = "float32",
        base_of_policy: bool = False,
    ) -> None:
        """Load the model, unless it is the base of the process's policy, whose adapters are off
        then."""
        super().__init__(context)
        policy = context.shared.get("policy") if base_of_policy else None
        self.model: PreTrainedModel | BaseOfPolicy
        if policy is not None and has_adapters(policy):
            self.model = BaseOfPolicy(policy)
        else:
            self.model = load_model(model_path, dtype).eval().requires_grad_(False)
        self.temperature, self.budget = temperature, max_tokens_per_micro_batch
        context.shared[context.role] = self.model

    @dispatch(Dispatch.DATA_PARALLEL, reads=TOKENS, gives=("ref_log_probs",))
    def log_probs(self, batch: Batch) -> Batch:
        """`ref_log_probs [B, R]`."""
        out = torch.zeros(batch["responses"].shape)
        with torch.no_grad():
            for rows, micro in micro_batches(batch, self.budget):
                width = micro["responses"].shape[1]
                out[rows, :width] = response_log_probs(self.model, micro, self.temperature).cpu()
        return Batch({"ref_log_probs": out})

    @dispatch(Dispatch.DATA_PARALLEL, reads=TOKENS, gives=("ref_kl",))
    def full_kl(self, batch: Batch) -> Batch:
        """`ref_kl [B, R]`: exact KL of the process's policy, as it is now, from this model."""
        out = torch.zeros(batch["responses"].shape)
        with torch.no_grad():
            for rows, micro in micro_batches(batch, self.budget):
                kl = token_outputs(
                    self.context.shared["policy"], micro, self.temperature, reference=self.model
                ).full_kl
                assert kl is not None
                out[rows, : micro["responses"].shape[1]] = kl.cpu()
        return Batch({"ref_kl": out})
