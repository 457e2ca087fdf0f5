"""The critic role: values of the states along a completion, and their update."""

from functools import partial

from torch import Tensor

from engine.algorithms.aggregation import Denominators, accumulate_mean, aggregate
from engine.algorithms.critic_loss import value_loss
from engine.batch import TOKENS, Batch
from engine.config import CriticConfig, LoRAConfig, ParallelConfig
from engine.models import open_critic_model
from engine.models.forward import Outputs, ValueReader
from engine.parallel.layout import Layout
from engine.runtime.sharded_model import Metrics, ShardedModel, init_mesh
from engine.runtime.train_state import ShardedTrainState
from engine.workers.actor import TrainingWorker
from engine.workers.role import Dispatch, WorkerContext, dispatch


class CriticWorker(TrainingWorker):
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
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__(context)
        self.config, parallel = config, parallel or ParallelConfig()
        ranks = init_mesh(Layout.of(parallel), context.rank, context.world_size, context.address)
        lora = LoRAConfig.model_validate(config.lora.model_dump())
        model = open_critic_model(model_path, dtype, lora, seed)  # without dropout
        self.sharded = ShardedModel(model, ranks, parallel)
        self.train_state = ShardedTrainState(self.sharded, config.optim, total_steps, seed)

    @dispatch(Dispatch.DATA_PARALLEL, reads=TOKENS, writes=("values",))
    def values(self, batch: Batch) -> Batch:
        """`values [B, R]` of the states before each response token."""
        budget = self.config.max_tokens_per_micro_batch
        return Batch(self.sharded.read(batch, budget, ValueReader()))

    @dispatch(Dispatch.DATA_PARALLEL_METRICS)
    def update(self, batch: Batch) -> dict[str, float]:
        """Fit `returns [B, R]` from `values [B, R]`, clipped around the old values."""
        return {f"critic/{k}": v for k, v in self.take_steps(batch, self._accumulate).items()}

    def _accumulate(self, mini: Batch) -> list[Metrics]:
        denominators = self.sharded.global_counts(mini["response_mask"])
        loss = partial(self._value_loss, denominators=denominators)
        return self.accumulate_rows(mini, ValueReader(), loss)

    def _value_loss(
        self, outputs: Outputs, micro: Batch, *, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        mask = micro["response_mask"]
        out = value_loss(
            outputs["values"],
            micro["values"],
            micro["returns"],
            mask,
            cliprange_value=self.config.cliprange_value,
        )
        metrics = {"vf_loss": accumulate_mean(out.loss, mask)} | dict(out.metrics)
        return aggregate(out.loss, mask, "token-mean", denominators), metrics
