"""The reference: the policy as it was before RL, frozen; or a teacher, which is as frozen.

Beside a policy with adapters the reference is that policy without them, and no copy is made.
"""

from __future__ import annotations

from engine.batch import TOKENS, Batch
from engine.config import ParallelConfig
from engine.models import has_adapters, load_model
from engine.parallel.layout import Layout
from engine.runtime.micro_batches import micro_batches
from engine.runtime.sharded_model import ShardedModel, init_mesh
from engine.runtime.token_outputs import LogProbReader, Outputs, ReferenceLogits
from engine.workers.base import Dispatch, Worker, WorkerContext, dispatch


class ReferenceWorker(Worker):
    """Gives the frozen model's log-probs. Shares itself with its process by the role's name."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        temperature: float,
        max_tokens_per_micro_batch: int,
        dtype: str = "float32",
        base_of_policy: bool = False,
        parallel: ParallelConfig | None = None,
    ) -> None:
        """Load the model, unless it is the base of the process's policy, whose adapters are off
        then. `parallel` is how the model is sharded; None: one rank."""
        super().__init__(context)
        self.temperature, self.budget = temperature, max_tokens_per_micro_batch
        policy: ShardedModel | None = context.shared.get("sharded") if base_of_policy else None
        if policy is not None and has_adapters(policy.module):
            self.sharded = policy.without_adapters()
        else:
            parallel = parallel or ParallelConfig()
            model = load_model(model_path, dtype).eval().requires_grad_(False)
            ranks = init_mesh(context, Layout.of(parallel))
            self.sharded = ShardedModel(model, ranks, parallel)
        context.shared[context.role] = self.sharded

    @dispatch(Dispatch.DATA_PARALLEL, pad=True, reads=TOKENS, writes=("ref_log_probs",))
    def log_probs(self, batch: Batch) -> Batch:
        """`ref_log_probs [B, R]`."""
        return Batch({"ref_log_probs": self._outputs(batch, self.sharded, None)["log_probs"]})

    @dispatch(Dispatch.DATA_PARALLEL, reads=TOKENS, writes=("ref_kl",))
    def full_kl(self, batch: Batch) -> Batch:
        """`ref_kl [B, R]`: exact KL of the process's policy, as it is now, from this model."""
        policy: ShardedModel = self.context.shared["sharded"]
        return Batch({"ref_kl": self._outputs(batch, policy, self.sharded.logits)["full_kl"]})

    def _outputs(
        self, batch: Batch, sharded: ShardedModel, reference: ReferenceLogits | None
    ) -> Outputs:
        reader = LogProbReader(self.temperature, readout=sharded.readout(), reference=reference)
        return sharded.outputs(batch, list(micro_batches(batch, self.budget)), reader)
