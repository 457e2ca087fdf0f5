"""A model sharded over a role's ranks, one or many, and passes of micro-batches over it.

`engine.models` defines a forward pass, `engine.parallel` shards a model and `micro_batch_runner`
runs passes; here every layout has the same two calls, `outputs` (no gradient) and `accumulate`
(gradients of a loss). The caller defines the loss and takes the optimizer step.

On many ranks a batch is this rank's rows; a loss divides by the counts of all rows
(`global_counts`). Ranks that differ in tp, sp or pp only have the same rows, compute the same loss
and get the same outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.algorithms.aggregation import Denominators
from engine.algorithms.metrics import MeanAccumulator, merge
from engine.batch import Batch
from engine.config import OptimConfig, ParallelConfig
from engine.models.packing import packing_of
from engine.models.token_statistics import TokenStatistics, token_statistics
from engine.models.unloaded import UnloadedModel
from engine.parallel import fsdp, gradients
from engine.parallel import pipeline_stages as stages
from engine.parallel.gather import gather_full_tensors, load_full_tensors
from engine.parallel.layout import DATA_AXES, Layout
from engine.parallel.pipeline_schedule import Pipeline
from engine.parallel.process_groups import Ranks, init_process_group
from engine.parallel.vocab_parallel import VocabParallelStatistics
from engine.runtime.apply_layout import ModelPart, apply_layout, floating_dtype
from engine.runtime.loss_scale import LossScale
from engine.runtime.micro_batch_runner import MicroBatchRunner
from engine.runtime.micro_batches import micro_batches
from engine.runtime.optimizer import Optimizer
from engine.runtime.packed_passes import accept, check_sample
from engine.runtime.token_outputs import OutputReader, Outputs

Metrics = dict[str, MeanAccumulator]
Loss = Callable[[Outputs, Batch], tuple[Tensor, Metrics]]
RENDEZVOUS_TIMEOUT_S = 120.0


def init_mesh(layout: Layout, rank: int, world_size: int, address: str) -> Ranks:
    """This process's place in `layout`; makes the default process group where there is none.

    `address`: where the ranks meet, "host:port"; unused by a layout of one rank.
    """
    if layout.world_size > 1 and not dist.is_initialized():
        init_process_group(address, rank, world_size, RENDEZVOUS_TIMEOUT_S)
    return Ranks.form(layout, process_device().type)


def process_device() -> torch.device:
    """This process's CUDA device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class ShardedModel:
    """This rank's shard of a model, and its passes."""

    def __init__(
        self,
        model: nn.Module | UnloadedModel,
        ranks: Ranks,
        config: ParallelConfig,
        *,
        device: torch.device | None = None,
    ) -> None:
        """Shard `model` in place; every rank passes the same full one. `module` is this rank's.

        Of an unloaded model each rank reads its shards. `device`: where the model is and stays;
        None moves it to this process's device.
        """
        self.ranks, self.config = ranks, config
        self.device = device or process_device()
        if isinstance(model, nn.Module) and device is None:
            model = model.to(self.device)
        self.module = apply_layout(model, ranks, config, self.device)
        pipeline = _pipeline(self.module, ranks, config, self.device)
        self._runner = MicroBatchRunner(self.module, ranks, config, self.device, pipeline)
        self._packing_checked = False
        self.loss_scale: LossScale | None = None  # the optimizer's, where it has one

    def without_adapters(self) -> ShardedModel:
        """The same model with its adapters disabled: the base of a policy with adapters."""
        base = copy.copy(self)
        base._runner = self._runner.without_adapters()
        return base

    def statistics(self) -> TokenStatistics:
        """How log-probs are computed from this rank's logits."""
        if self.ranks.size("tp") == 1:
            return token_statistics
        return VocabParallelStatistics.of(self.module.config.vocab_size, self.ranks.submesh("tp"))

    def micro_batches(
        self, batch: Batch, max_tokens: int, rows: Tensor | None = None
    ) -> list[tuple[Tensor, Batch]]:
        """Row numbers and rows of micro-batches within the token budget: see `micro_batches`.

        `rows`: those of the batch that are passed, row numbers being among them; None: all.
        """
        self._check_packing(batch)
        chosen = batch if rows is None else batch.rows(rows)
        return list(micro_batches(chosen, max_tokens, packing_of(self.module)))

    @torch.no_grad()
    def outputs(
        self, batch: Batch, passes: Sequence[tuple[Tensor, Batch]], reader: OutputReader
    ) -> Outputs:
        """`reader`'s outputs `[B, R, …]` for all rows of `batch`, on the CPU; `passes` are its
        micro-batches, each with its row numbers."""
        self._check_packing(batch)
        shape, out = batch["responses"].shape, dict[str, Tensor]()
        micros = self._pad_passes([micro for _, micro in passes], batch)
        for index, got in enumerate(self._runner.outputs(micros, reader)):  # dummies too
            if index < len(passes):
                rows, micro = passes[index]
                for name, value in got.items():
                    whole = out.get(name)
                    if whole is None:
                        whole = torch.zeros((*shape, *value.shape[2:]), dtype=value.dtype)
                        out[name] = whole
                    whole[rows, : micro["responses"].shape[1]] = value.cpu()
        return {name: out[name] if name in out else torch.zeros(shape) for name in reader.names()}

    def accumulate(
        self, batch: Batch, micros: Sequence[Batch], reader: OutputReader, loss: Loss
    ) -> list[Metrics]:
        """Add the gradients of `loss` over the micro-batches, summed over all ranks' rows; times
        `loss_scale`, where there is one.

        `batch` is the batch of the micro-batches; a row of it makes dummy passes where other ranks
        have more. Only ranks of the last pipeline stage have metrics: see `all_reduce_metrics`.
        """
        self._check_packing(batch)
        even = self._pad_passes(micros, batch)
        parts: list[Metrics] = []

        def loss_or_zero(index: int, got: Outputs) -> Tensor:
            if index >= len(micros):  # a dummy pass: collectives only
                return torch.stack([value.sum() for value in got.values()]).sum() * 0.0
            value, metrics = loss(got, even[index])
            parts.append(metrics)
            return value if self.loss_scale is None else value * self.loss_scale.value

        self._runner.backward(even, reader, loss_or_zero)
        self._all_reduce_gradients()
        return parts

    def any_rank_has(self, count: int) -> bool:
        """Whether `count` is above 0 on any rank."""
        return self.ranks.max_over(count, DATA_AXES) > 0

    def global_count(self, count: int) -> int:
        """The sum of all data-parallel ranks' counts."""
        if self.ranks.group(*DATA_AXES) is None:
            return count
        return int(self.ranks.sum_over(torch.tensor(count, device=self.device), DATA_AXES))

    def global_counts(self, mask: Tensor) -> Denominators:
        """Denominators of `mask [B, T]` over all ranks' rows."""
        own = Denominators.from_mask(mask)
        counts = torch.tensor([own.tokens, own.sequences], dtype=torch.float64, device=self.device)
        tokens, sequences = self.ranks.sum_over(counts, DATA_AXES).tolist()
        return Denominators(tokens, sequences, own.width)

    def all_reduce_metrics(self, parts: Sequence[Metrics]) -> Metrics:
        """The metrics of all ranks' micro-batches merged, on every rank."""
        own = merge(parts)
        group = self.ranks.group("pp", *DATA_AXES)
        if group is None:
            return own
        plain = {name: (type(s), float(s.total), float(s.count)) for name, s in own.items()}
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, plain, group=group)
        return merge(
            {
                name: kind(torch.tensor(t).double(), torch.tensor(c).double())
                for name, (kind, t, c) in e
            }
            for e in (ranks.items() for ranks in every)
        )

    def full_name(self, name: str) -> str:
        """The name in the full model of a parameter of this rank.

        The last stage's copy of a tied embedding has the embedding's name.
        """
        return self._tied_copies.get(name, name)

    def full_tensors(
        self, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the full model, one at a time; all ranks iterate to the end together.

        `wanted`: of which names; None: of all.
        """
        return gather_full_tensors(self.module, self.ranks, self._tied_copies, wanted)

    def load_full_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy full tensors into this rank's shards."""
        load_full_tensors(self.module, tensors, self.ranks, self._tied_copies)

    @property
    def _tied_copies(self) -> dict[str, str]:
        """This rank's copies of another stage's tensors, and their names there."""
        module = self.module
        if not isinstance(module, stages.PipelineStage) or not module.last:
            return {}
        embedding = f"{module.embedding_name}.weight"
        return dict.fromkeys(stages.tied_across_stages(module), embedding)

    def logits(self, micro: Batch) -> Tensor:
        """This rank's logits `[N, V]` of the positions that its readers read."""
        self._check_packing(micro)
        return self._runner.logits(micro)

    def _check_packing(self, batch: Batch) -> None:
        """The first time, see that packed rows give what padded ones do; else pad from then on."""
        if self._packing_checked or not packing_of(self.module):
            return
        self._packing_checked = True
        error = self._runner.packing_error(check_sample(batch))
        accept(self.module, error, self.ranks, self.config)

    def _pad_passes(self, micros: Sequence[Batch], batch: Batch) -> list[Batch]:
        """`micros`, padded with dummy passes to the largest number of any rank.

        Ranks gather sharded weights together, so all must run equally many passes.
        """
        own = [self._to_device(micro) for micro in micros]
        if not fsdp.shards_weights(self.ranks):
            return own
        missing = self.ranks.max_over(len(own), DATA_AXES) - len(own)
        return own + [self._to_device(batch.rows([0])) for _ in range(missing)]

    def _to_device(self, micro: Batch) -> Batch:
        if self.device.type == "cpu":
            return micro
        return Batch({n: t.to(self.device) for n, t in micro.as_dict().items()}, micro.columns)

    def _all_reduce_gradients(self) -> None:
        if self.ranks.layout.world_size == 1:
            return
        if not fsdp.shards_weights(self.ranks):
            trained = [p for p in self.module.parameters() if p.requires_grad]
            gradients.all_reduce_gradients(trained, self.ranks)
        if isinstance(self.module, stages.PipelineStage):
            stages.sum_tied_gradients(self.module, self.ranks)


def sharded_optimizer(sharded: ShardedModel, config: OptimConfig, total_steps: int) -> Optimizer:
    """The optimizer of this rank's shard of a model, which gets its loss scale."""
    optimizer = Optimizer(
        sharded.module,
        config,
        total_steps,
        ranks=sharded.ranks,
        offload=sharded.config.offload_optimizer,
        tied_duplicates=stages.tied_duplicates(sharded.module),
    )
    sharded.loss_scale = optimizer.loss_scale
    return optimizer


def _pipeline(
    module: ModelPart, ranks: Ranks, config: ParallelConfig, device: torch.device
) -> Pipeline | None:
    """The schedule of this rank's stage; None for a model in one piece."""
    if ranks.size("pp") == 1:
        return None
    asked = config.compute_dtype
    dtype = getattr(torch, asked) if asked else floating_dtype(module)
    return Pipeline(module, ranks, module.config.hidden_size, dtype, device)
