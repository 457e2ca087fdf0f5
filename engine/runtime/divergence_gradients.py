"""Gradients of a student's divergence from its teachers, token by token."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.algorithms.aggregation import Denominators
from engine.algorithms.metrics import MeanAccumulator, accumulate_mean
from engine.batch import Batch
from engine.runtime.divergence_outputs import DivergenceReader
from engine.runtime.sharded_model import ShardedModel
from engine.runtime.token_outputs import Outputs


def accumulate_divergence(
    sharded: ShardedModel,
    batch: Batch,
    reader: DivergenceReader,
    aggregate: Callable[[Tensor, Tensor, Denominators], Tensor],
    max_tokens: int,
) -> list[dict[str, MeanAccumulator]]:
    """Add the gradients of the divergence over all ranks' tokens, as `aggregate` makes one number
    of them `[B, R]`, their mask and its counts. Returns metrics: `divergence`, `entropy`."""
    denominators = sharded.global_counts(batch["response_mask"])

    def loss(got: Outputs, micro: Batch) -> tuple[Tensor, dict[str, MeanAccumulator]]:
        mask = micro["response_mask"]
        names = ("divergence", "entropy")
        metrics = {name: accumulate_mean(got[name].detach(), mask) for name in names}
        return aggregate(got["divergence"], mask, denominators), metrics

    micros = [micro for _, micro in sharded.micro_batches(batch, max_tokens)]
    return sharded.accumulate(batch, micros, reader, loss)
