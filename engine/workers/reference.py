"""The reference: the policy as it was before RL, frozen.

Beside a policy with adapters the reference is that policy with them disabled; nothing is copied.
"""

from __future__ import annotations

from engine.batch import TOKENS, Batch
from engine.config import ParallelConfig
from engine.models import has_adapters, open_model
from engine.parallel.layout import Layout
from engine.runtime.sharded_model import ShardedModel, init_mesh
from engine.runtime.token_outputs import LogProbReader, Outputs, ReferenceLogits
from engine.workers.base import Dispatch, Worker, WorkerContext, dispatch


class ReferenceWorker(Worker):
    """Gives the frozen model's log-probs."""

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
        """Load the model, or use the process's policy with its adapters disabled.

        The latter with `base_of_policy`. `parallel`: how the model is sharded; None: one rank.
        """
        super().__init__(context)
        self.temperature, self.budget = temperature, max_tokens_per_micro_batch
        policy = context.process.policy if base_of_policy else None
        if policy is not None and has_adapters(policy.module):
            self.sharded = policy.sharded.without_adapters()
        else:
            parallel = parallel or ParallelConfig()
            layout = Layout.of(parallel)
            ranks = init_mesh(layout, context.rank, context.world_size, context.address)
            model = open_model(model_path, dtype).requires_grad_(False)
            self.sharded = ShardedModel(model, ranks, parallel)
        if context.role == "reference":
            context.process.reference = self.sharded

    @dispatch(Dispatch.DATA_PARALLEL, pad=True, reads=TOKENS, writes=("ref_log_probs",))
    def log_probs(self, batch: Batch) -> Batch:
        """`ref_log_probs [B, R]`."""
        return Batch({"ref_log_probs": self._outputs(batch, self.sharded, None)["log_probs"]})

    @dispatch(Dispatch.DATA_PARALLEL, reads=TOKENS, writes=("ref_kl",))
    def full_kl(self, batch: Batch) -> Batch:
        """`ref_kl [B, R]`: exact KL of the process's policy, as it is now, from this model."""
        policy = self.context.process.policy
        assert policy is not None, "full_kl needs an actor in the same process"
        outputs = self._outputs(batch, policy.sharded, self.sharded.logits)
        return Batch({"ref_kl": outputs["full_kl"]})

    def _outputs(
        self, batch: Batch, sharded: ShardedModel, reference: ReferenceLogits | None
    ) -> Outputs:
        reader = LogProbReader(
            self.temperature, statistics=sharded.statistics(), reference=reference
        )
        return sharded.outputs(batch, sharded.micro_batches(batch, self.budget), reader)
