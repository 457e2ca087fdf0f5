"""A model on a role's ranks, one or many, and passes of micro-batches over it.

This is where the rooms meet: `engine.models` knows a forward pass, `engine.parallel` how a model is
spread; here every layout answers the same two calls, `outputs` (no gradient) and `accumulate`
(gradients of a loss). What the loss is, and the optimizer step, are the roles' matter.

On many ranks a batch is this rank's share of the rows; counts that a loss divides by are those of
all rows (`totals`). Ranks that differ in tp, sp or pp only have the same rows, compute the same
loss, and get the same outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.algorithms.aggregation import Denominators
from engine.algorithms.metrics import Sum, merge
from engine.batch import Batch
from engine.config import OptimConfig, ParallelConfig
from engine.models import BaseOfPolicy
from engine.models.forward import (
    Readout,
    Sequences,
    hidden_states,
    left_align,
    model_logits,
    plain_readout,
    response_logits,
)
from engine.models.packing import apply_packing
from engine.parallel import fsdp, gradients
from engine.parallel import pipeline_stages as stages
from engine.parallel.gather import full_parameters, load_full
from engine.parallel.layout import Layout
from engine.parallel.pipeline_schedule import Pipeline
from engine.parallel.process_groups import DATA_AXES, Ranks, join
from engine.parallel.sequence_parallel import apply_ulysses, merge_tokens, own_tokens, split_tokens
from engine.parallel.tensor_parallel import apply_tensor_parallel
from engine.parallel.vocab_parallel import VocabularyReadout
from engine.runtime.optimizer import Optimizer
from engine.runtime.token_outputs import Outputs, Reader
from engine.workers.base import WorkerContext

Metrics = dict[str, Sum]
Loss = Callable[[Outputs, Batch], tuple[Tensor, Metrics]]
MEETING_TIMEOUT_S = 120.0


def form_ranks(context: WorkerContext, layout: Layout) -> Ranks:
    """This process's place in `layout`; roles of one process meet the other ranks once."""
    if layout.world_size > 1 and not dist.is_initialized():
        join(context.address, context.rank, context.world_size, MEETING_TIMEOUT_S)
    return Ranks.form(layout, device().type)


def device() -> torch.device:
    """Where this process's models live: the device that it was given, or the CPU."""
    return _cuda() if torch.cuda.is_available() else torch.device("cpu")


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class SpreadModel:
    """What this rank has of a model, and its passes."""

    def __init__(self, model: nn.Module, ranks: Ranks, config: ParallelConfig) -> None:
        """Spread `model`, which every rank brings whole and alike; `module` is what is left."""
        self.ranks, self.config = ranks, config
        self.module, self._pipeline = self._apply(model.to(device()))
        self._adapters_off = False

    def without_adapters(self) -> SpreadModel:
        """The same model with its adapters off: what a policy with adapters started from."""
        base = copy.copy(self)
        base._adapters_off = True
        return base

    def readout(self) -> Readout:
        """How log-probs are read off the logits that this rank has."""
        if self.ranks.size("tp") == 1:
            return plain_readout
        module: Any = self.module
        return VocabularyReadout.of(module.config.vocab_size, self.ranks.submesh("tp"))

    @torch.no_grad()
    def outputs(
        self, batch: Batch, passes: Sequence[tuple[Tensor, Batch]], reader: Reader
    ) -> Outputs:
        """`reader`'s outputs `[B, R]` for all rows of `batch`, on the CPU; `passes` are its
        micro-batches, each with its row numbers."""
        shape = batch["responses"].shape
        out = {name: torch.zeros(shape) for name in reader.names()}
        micros = self._even([micro for _, micro in passes], batch)
        for index, got in enumerate(self._run(micros, reader)):  # stand-ins too: others wait
            if index < len(passes):
                rows, micro = passes[index]
                for name, value in got.items():
                    out[name][rows, : micro["responses"].shape[1]] = value.cpu()
        return out

    def accumulate(
        self, batch: Batch, micros: Sequence[Batch], reader: Reader, loss: Loss
    ) -> list[Metrics]:
        """Add the gradients of `loss` over the micro-batches, summed over all ranks' rows.

        `batch` is where they come from; it stands in where other ranks have more of them. A rank
        of another pipeline stage than the last knows no metrics: see `totals`.
        """
        even = self._even(micros, batch)
        parts: list[Metrics] = []

        def guarded(index: int, got: Outputs) -> Tensor:
            if index >= len(micros):  # takes part in the others' collectives, and adds nothing
                return torch.stack([value.sum() for value in got.values()]).sum() * 0.0
            value, metrics = loss(got, even[index])
            parts.append(metrics)
            return value

        self._run_backward(even, reader, guarded)
        self._sum_gradients()
        return parts

    def any_micro(self, count: int) -> bool:
        """Whether any rank has micro-batches in this update."""
        return self.ranks.max_over(count, DATA_AXES) > 0

    def total(self, count: int) -> int:
        """A count of all ranks' rows, from each one's."""
        if self.ranks.group(*DATA_AXES) is None:
            return count
        return int(self.ranks.sum_over(torch.tensor(count, device=device()), DATA_AXES))

    def totals(self, mask: Tensor) -> Denominators:
        """The counts over `mask [B, T]` of all ranks' rows."""
        own = Denominators.from_mask(mask)
        counts = torch.tensor([own.tokens, own.sequences], dtype=torch.float64, device=device())
        tokens, sequences = self.ranks.sum_over(counts, DATA_AXES).tolist()
        return Denominators(tokens, sequences, own.width)

    def merged(self, parts: Sequence[Metrics]) -> Metrics:
        """Metrics of all ranks' micro-batches together, on every rank."""
        own = merge(parts)
        group = self.ranks.group("pp", *DATA_AXES)
        if group is None:
            return own
        plain = {name: (float(s.total), float(s.count)) for name, s in own.items()}
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, plain, group=group)
        return merge(
            {name: Sum(torch.tensor(t).double(), torch.tensor(c).double()) for name, (t, c) in e}
            for e in (ranks.items() for ranks in every)
        )

    def whole_name(self, name: str) -> str:
        """A parameter of this rank by the name that it has in the whole model.

        The last stage's copy of a tied embedding goes by the embedding's.
        """
        return self._copies.get(name, name)

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the whole model, one at a time; all ranks iterate to the end together."""
        return full_parameters(self.module, self.ranks, self._copies)

    def load_whole(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy whole tensors into what this rank has of them."""
        load_full(self.module, tensors, self.ranks, self._copies)

    @property
    def _copies(self) -> dict[str, str]:
        """This rank's tensors that another stage has as well, and their names there."""
        module: Any = self.module
        if not isinstance(module, stages.Stage) or not module.last:
            return {}
        return dict.fromkeys(stages.tied_across_stages(module), "model.embed_tokens.weight")

    def logits(self, micro: Batch) -> Tensor:
        """Logits `[N, V]`, as far as this rank has them, where this rank's readers read them."""

        def run() -> Tensor:
            if not self._is_cut:
                return model_logits(self.module, left_align(micro))
            hidden, seqs = self._hidden(micro)
            module: Any = self.module
            return response_logits(module.get_output_embeddings(), hidden, seqs)

        with torch.no_grad(), self._lent():
            return fsdp.call(self.module, run)

    def _apply(self, model: Any) -> tuple[nn.Module, Pipeline | None]:
        ranks, config = self.ranks, self.config
        module: Any = model
        if config.packing:
            apply_packing(module)
        if ranks.size("pp") > 1:
            module = stages.take_stage(model, ranks.index("pp"), ranks.size("pp"))
        layers = decoder_layers(module)
        if ranks.size("tp") > 1:
            apply_tensor_parallel(
                module, ranks.submesh("tp"), sequence_parallel=config.sequence_parallel
            )
        if config.activation_checkpointing:
            fsdp.checkpoint_activations(layers)
        apply_ulysses(module, ranks)
        fsdp.shard_model(module, ranks, config, layers=layers)
        if ranks.size("pp") == 1:
            return module, None
        dtype = getattr(torch, config.compute_dtype) if config.compute_dtype else _dtype(module)
        hidden = module.config.hidden_size
        return module, Pipeline(module, ranks, hidden, dtype, device())

    @property
    def _is_cut(self) -> bool:
        """Whether sequences are shared by ranks, so that a pass is more than a call."""
        return self.ranks.size("sp") > 1

    def _even(self, micros: Sequence[Batch], batch: Batch) -> list[Batch]:
        """`micros`, and what stands in until there are as many as on any other rank.

        Ranks that share weights gather them together, so all must run equally many passes.
        """
        own = [_to(micro) for micro in micros]
        if not fsdp.shards(self.ranks):
            return own
        missing = self.ranks.max_over(len(own), DATA_AXES) - len(own)
        return own + [_to(_blank(batch)) for _ in range(missing)]

    def _run(self, micros: Sequence[Batch], reader: Reader) -> Iterator[Outputs]:
        if self._pipeline is None:
            for micro in micros:
                with self._lent():
                    yield self._one(micro, reader)
            return
        yield from self._through_stages(micros, reader)

    def _run_backward(
        self, micros: Sequence[Batch], reader: Reader, loss: Callable[[int, Outputs], Tensor]
    ) -> None:
        if self._pipeline is None:
            for index, micro in enumerate(micros):
                with self._lent():
                    loss(index, self._one(micro, reader)).backward()
            return
        seqs, positions = self._shares(micros)

        def read(index: int, hidden: Tensor) -> Tensor:
            own = reader.at(self.module, hidden, seqs[index], micros[index])
            return loss(index, self._merged(own))

        with self._lent():
            ids = [s.input_ids for s in seqs]
            self._pipeline.run(ids, read, backward=True, positions=positions)

    def _through_stages(self, micros: Sequence[Batch], reader: Reader) -> Iterator[Outputs]:
        """Run all micro-batches through the pipeline; the last stage tells the others."""
        assert self._pipeline is not None
        seqs, positions = self._shares(micros)
        done: dict[int, Outputs] = {}

        def read(index: int, hidden: Tensor) -> None:
            own = reader.at(self.module, hidden, seqs[index], micros[index])
            done[index] = self._merged(own)

        with self._lent():
            ids = [s.input_ids for s in seqs]
            self._pipeline.run(ids, read, backward=False, positions=positions)
        group, last = self.ranks.group("pp"), self.ranks.size("pp") - 1
        for index, micro in enumerate(micros):
            found = done.get(index) or {
                name: torch.zeros(micro["responses"].shape, device=device())
                for name in reader.names()
            }
            for name in reader.names():
                dist.broadcast(found[name], group=group, group_src=last)
            yield found

    def _one(self, micro: Batch, reader: Reader) -> Outputs:
        if not self._is_cut:
            return fsdp.call(self.module, lambda: reader.whole(self.module, micro))

        def run() -> Outputs:
            hidden, seqs = self._hidden(micro)
            return reader.at(self.module, hidden, seqs, micro)

        return self._merged(fsdp.call(self.module, run))

    def _merged(self, own: Outputs) -> Outputs:
        """Outputs of all tokens, from those of each rank's share of the sequences."""
        return {name: merge_tokens(value, self.ranks) for name, value in own.items()}

    def _hidden(self, micro: Batch) -> tuple[Tensor, Sequences]:
        """Hidden states of this rank's share of each sequence, and the tokens that lie in it."""
        own, positions = self._share(micro)
        return hidden_states(self.module, own, position_ids=positions), own

    def _share(self, micro: Batch) -> tuple[Sequences, Tensor]:
        """This rank's share of each sequence, and its positions in the whole."""
        seqs = left_align(micro)
        ids, positions = split_tokens(seqs.input_ids, self.ranks)
        mine, columns = own_tokens(seqs.positions, ids.shape[1], self.ranks)
        own = Sequences(ids, seqs.rows[mine], columns, seqs.targets[mine], seqs.columns[mine])
        return own, positions

    def _shares(self, micros: Sequence[Batch]) -> tuple[list[Sequences], list[Tensor] | None]:
        """What goes through the stages; positions only where rows are shared."""
        if not self._is_cut:
            return [left_align(micro) for micro in micros], None
        own, positions = zip(*map(self._share, micros), strict=True)
        return list(own), list(positions)

    @contextmanager
    def _lent(self) -> Iterator[None]:
        module: Any = self.module
        with self._precision():
            if not self._adapters_off:
                yield
                return
            with BaseOfPolicy(module).weights():
                yield

    def _precision(self) -> AbstractContextManager[Any]:
        """Lower precision where no FSDP casts weights: torch's autocast."""
        if not self.config.compute_dtype or fsdp.shards(self.ranks):
            return nullcontext()
        dtype = getattr(torch, self.config.compute_dtype)
        return torch.autocast(device().type, dtype=dtype, enabled=dtype != torch.float32)

    def _sum_gradients(self) -> None:
        if self.ranks.layout.world_size == 1:
            return
        if not fsdp.shards(self.ranks):
            trained = [p for p in self.module.parameters() if p.requires_grad]
            gradients.sync_replicas(trained, self.ranks)
        if isinstance(self.module, stages.Stage):
            stages.sum_tied_gradients(self.module, self.ranks)


def trained_by(spread: SpreadModel, config: OptimConfig, total_steps: int) -> Optimizer:
    """The optimizer of what this rank has of a model."""
    return Optimizer(
        spread.module,
        config,
        total_steps,
        ranks=spread.ranks,
        offload=spread.config.offload_optimizer,
        counted_elsewhere=stages.counted_elsewhere(spread.module),
    )


def decoder_layers(module: Any) -> list[nn.Module]:
    """The repeated layers of a model, a critic or a stage, in order."""
    if isinstance(module, stages.Stage):
        return module.layers
    body = module.base_model
    count = body.config.get_text_config().num_hidden_layers
    found = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return list(found[0]) if found else []


def _dtype(module: nn.Module) -> torch.dtype:
    return next(p.dtype for p in module.parameters() if p.is_floating_point())


def _to(micro: Batch) -> Batch:
    if device().type == "cpu":
        return micro
    return Batch({n: t.to(device()) for n, t in micro.as_dict().items()}, micro.columns)


def _blank(batch: Batch) -> Batch:
    """A row of `batch`: its outputs are thrown away."""
    return batch.rows([0])
