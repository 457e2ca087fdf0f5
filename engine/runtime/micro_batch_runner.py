"""Forward and backward passes of micro-batches over a rank's shard of a model.

A pass runs the module, or this rank's pipeline stage; with sequence parallelism each rank computes
its part of every sequence, and the outputs are summed over the ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.batch import Batch
from engine.config import ParallelConfig
from engine.models import BaseModelView
from engine.models.alignment import Sequences, left_align, pack
from engine.models.forward import (
    distance,
    hidden_states,
    model_logits,
    packing_error,
    response_logits,
)
from engine.models.packing import PackedRows, Packing, packed_forward
from engine.models.vocabulary_head import require_vocabulary_head
from engine.parallel import fsdp
from engine.parallel.pipeline_schedule import OnHidden, Pipeline
from engine.parallel.process_groups import Ranks
from engine.parallel.sequence_parallel import (
    local_tokens,
    split_packed,
    split_tokens,
    sum_tokens,
)
from engine.runtime.token_outputs import OutputReader, Outputs


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's part of a micro-batch's sequences."""

    seqs: Sequences
    positions: Tensor  # [b, L / sp] of its columns in the whole sequences
    rows: PackedRows | None  # the part of packed rows; None: they are padded


class MicroBatchRunner:
    """Runs micro-batches through a sharded module; all ranks that share it call it together."""

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        config: ParallelConfig,
        device: torch.device,
        pipeline: Pipeline | None,
    ) -> None:
        """`pipeline`: the schedule of this rank's stage; None for a model without stages."""
        self.module, self.ranks, self.config, self.device = module, ranks, config, device
        self._pipeline = pipeline
        self._adapters_off = False

    def without_adapters(self) -> MicroBatchRunner:
        """The same with the module's adapters disabled."""
        base = copy.copy(self)
        base._adapters_off = True
        return base

    def outputs(self, micros: Sequence[Batch], reader: OutputReader) -> Iterator[Outputs]:
        """`reader`'s outputs `[b, R]` of each micro-batch, on this rank's device."""
        if self._pipeline is None:
            for micro in micros:
                with self._forward_context(), reader.around(self.module, micro):
                    yield self._forward(micro, reader)
            return
        yield from self._run_pipeline(micros, reader)

    def backward(
        self, micros: Sequence[Batch], reader: OutputReader, loss: Callable[[int, Outputs], Tensor]
    ) -> None:
        """Run each micro-batch forward and backward; `loss` takes its index and its outputs."""
        if self._pipeline is None:
            for index, micro in enumerate(micros):
                with self._forward_context(), reader.around(self.module, micro):
                    loss(index, self._forward(micro, reader)).backward()
            return
        shares = [self._share(micro) for micro in micros]

        def read(index: int, hidden: Tensor) -> Tensor:
            own = reader.from_hidden(self.module, hidden, shares[index].seqs, micros[index])
            return loss(index, self._merge_sequences(own))

        self._run_stages(shares, read, backward=True)

    def logits(self, micro: Batch) -> Tensor:
        """This rank's logits `[N, V]` of the positions that its readers read."""

        def run() -> Tensor:
            if not self._shards_sequences:
                return model_logits(self.module, left_align(micro))
            hidden, seqs = self._hidden(micro)
            return response_logits(require_vocabulary_head(self.module), hidden, seqs)

        with torch.no_grad(), self._forward_context():
            return fsdp.run_forward(self.module, run)

    def packing_error(self, sample: Batch) -> float:
        """How far the module's packed rows are from padded ones; see `forward.packing_error`."""
        training = self.module.training
        self.module.eval()  # without dropout

        def run() -> float:
            if not self._shards_sequences and self._pipeline is None:
                return packing_error(self.module, sample)
            return distance(*(self._states(sample, packing) for packing in (True, False)))

        with torch.no_grad(), self._forward_context():
            stages = self._pipeline is not None
            error = run() if stages else fsdp.run_forward(self.module, run)
        self.module.train(training)
        return error

    def _run_pipeline(self, micros: Sequence[Batch], reader: OutputReader) -> Iterator[Outputs]:
        """Run all micro-batches through the pipeline; the last stage broadcasts the outputs."""
        assert self._pipeline is not None
        shares = [self._share(micro) for micro in micros]
        done: dict[int, Outputs] = {}

        def read(index: int, hidden: Tensor) -> None:
            own = reader.from_hidden(self.module, hidden, shares[index].seqs, micros[index])
            done[index] = self._merge_sequences(own)

        self._run_stages(shares, read, backward=False)
        group, last = self.ranks.group("pp"), self.ranks.size("pp") - 1
        for index, micro in enumerate(micros):
            found = done.get(index) or {
                name: torch.zeros(micro["responses"].shape, device=self.device)
                for name in reader.names()
            }
            for name in reader.names():
                dist.broadcast(found[name], group=group, group_src=last)
            yield found

    def _forward(self, micro: Batch, reader: OutputReader) -> Outputs:
        if not self._shards_sequences:
            return fsdp.run_forward(self.module, lambda: reader.from_model(self.module, micro))

        def run() -> Outputs:
            hidden, seqs = self._hidden(micro)
            return reader.from_hidden(self.module, hidden, seqs, micro)

        return self._merge_sequences(fsdp.run_forward(self.module, run))

    def _merge_sequences(self, own: Outputs) -> Outputs:
        """Outputs of all tokens, from each rank's part of the sequences."""
        return {name: sum_tokens(value, self.ranks) for name, value in own.items()}

    def _hidden(self, micro: Batch, packing: Packing | None = None) -> tuple[Tensor, Sequences]:
        """Hidden states of this rank's part of the sequences, and the tokens in it."""
        share = self._share(micro, packing)
        if share.rows is None:
            return hidden_states(self.module, share.seqs, position_ids=share.positions), share.seqs
        module: Any = self.module
        return packed_forward(module.base_model, share.rows).last_hidden_state, share.seqs

    def _states(self, sample: Batch, packing: Packing) -> Tensor:
        """Hidden states [N, H] of all ranks' tokens, for a sample that is packed, or not.

        Of stages the last one has them, others none.
        """
        found: list[Tensor] = []
        if self._pipeline is None:
            hidden, own = self._hidden(sample, packing)
            found = [hidden]
        else:
            share = self._share(sample, packing)
            own = share.seqs
            self._run_stages([share], lambda _, last: found.append(last), backward=False)
        every = left_align(sample)
        if not found:
            return torch.zeros(0, 1)
        [hidden] = found
        whole = hidden.new_zeros(*sample["responses"].shape, hidden.shape[-1])
        seqs, every = own.to(hidden.device), every.to(hidden.device)
        whole[seqs.rows, seqs.columns] = own.states(hidden)
        return sum_tokens(whole, self.ranks)[every.rows, every.columns]

    def _share(self, micro: Batch, packing: Packing | None = None) -> _Share:
        """This rank's part of the sequences."""
        seqs = left_align(micro)
        rows = pack(self.module, seqs, packing, multiple=self.ranks.size("sp", "tp"))
        if rows is None and not self._shards_sequences:
            columns = torch.arange(seqs.input_ids.shape[1], device=seqs.input_ids.device)
            return _Share(seqs, columns[None], None)
        if rows is None:
            ids, positions = split_tokens(seqs.input_ids, self.ranks)
            places = seqs.positions
        else:
            ids, positions = split_packed(rows.input_ids, rows.position_ids, self.ranks)
            places = rows.index(*(t.to(ids.device) for t in (seqs.rows, seqs.positions)))
            rows = replace(rows, input_ids=ids, position_ids=positions)
            seqs = seqs.to(ids.device)
        mine, columns = local_tokens(places, ids.shape[1], self.ranks)
        own = Sequences(
            ids,
            seqs.rows[mine],
            columns,
            seqs.targets[mine],
            seqs.columns[mine],
            packed=rows is not None,
        )
        return _Share(own, positions, rows)

    def _run_stages(self, shares: Sequence[_Share], read: OnHidden, *, backward: bool) -> None:
        """Send this rank's parts of micro-batches through the pipeline."""
        assert self._pipeline is not None
        with self._forward_context():
            self._pipeline.run(
                [share.seqs.input_ids for share in shares],
                read,
                backward=backward,
                positions=[share.positions for share in shares],
                segments=[share.rows and share.rows.segments for share in shares],
            )

    @property
    def _shards_sequences(self) -> bool:
        """Whether ranks split sequences between them."""
        return self.ranks.size("sp") > 1

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        module: Any = self.module
        with self._precision():
            if not self._adapters_off:
                yield
                return
            with BaseModelView(module).weights():
                yield

    def _precision(self) -> AbstractContextManager[object]:
        """Autocast, where FSDP doesn't cast the weights, and they are not of that dtype already."""
        if not self.config.compute_dtype or fsdp.shards_weights(self.ranks):
            return nullcontext()
        dtype = getattr(torch, self.config.compute_dtype)
        other = any(p.is_floating_point() and p.dtype != dtype for p in self.module.parameters())
        enabled = other and dtype != torch.float32
        return torch.autocast(self.device.type, dtype=dtype, enabled=enabled)
