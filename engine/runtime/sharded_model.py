"""A model sharded over a role's ranks, one or many, and passes of micro-batches over it.

How rows become mini-batches and micro-batches within a token budget, and `ShardedModel`, whose
passes are the same under every layout.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.algorithms.aggregation import Denominators, MeanAccumulator, merge
from engine.batch import FIELDS, Batch
from engine.config import OptimConfig, ParallelConfig
from engine.data.collate import shared_prompt_batches, token_budget_batches
from engine.errors import DataError
from engine.models import BaseModelView, forward
from engine.models import packing as row_packing
from engine.models.forward import OutputReader, Outputs
from engine.models.policy import UnloadedModel
from engine.models.vocabulary_head import TokenStatistics, require_vocabulary_head, token_statistics
from engine.parallel import fsdp, gradients
from engine.parallel import pipeline_parallel as stages
from engine.parallel.layout import DATA_AXES, Layout
from engine.parallel.module_shards import gather_full_tensors, load_full_tensors
from engine.parallel.pipeline_parallel import OnHidden, Pipeline
from engine.parallel.process_groups import Ranks, init_process_group
from engine.parallel.sequence_parallel import local_tokens, split_packed, split_tokens, sum_tokens
from engine.parallel.vocab_parallel import VocabParallelStatistics
from engine.runtime import apply_layout
from engine.runtime.optimizer import LossScale, Optimizer


def minibatch_indices(
    rows: int, size: int, ranks: Ranks, generator: torch.Generator | None
) -> list[Tensor]:
    """Split this rank's `rows` into mini-batches of `size` rows over all ranks; 0: one of all rows.

    Returns row numbers (long), shuffled by `generator` where there are several mini-batches. All
    ranks get equally many of them, so that they step together: with several data-parallel ranks
    each splits its own rows into equal parts. Raises DataError if a rank has fewer rows than that.
    """
    alone, total = ranks.group(*DATA_AXES) is None, rows
    if not alone:
        assert ranks.mesh is not None
        local = torch.tensor(rows, device=ranks.mesh.device_type)
        total = int(ranks.sum_over(local, DATA_AXES))
    count = math.ceil(total / size) if size else 1
    if count <= 1:
        return [torch.arange(rows)]
    order = torch.randperm(rows, generator=generator)
    if alone:
        return list(order.split(size))
    if rows < count:
        raise DataError(
            f"a rank has {rows} rows for {count} mini-batches; raise ppo_mini_batch_size, or use "
            "fewer data-parallel ranks"
        )
    return list(order.tensor_split(count))


def micro_batches(
    batch: Batch, max_tokens: int, packing: row_packing.Packing = False
) -> Iterator[tuple[Tensor, Batch]]:
    """Cut a batch into runs of rows, each within the token budget.

    Padded rows are of similar length; with packing, where it is worthwhile, rows that share a
    prompt, or more, stay together, and what they share counts once. Yields row numbers `[b]` and
    those rows, their prompt and response columns trimmed to the longest of them.
    """
    for index in _cut(batch, max_tokens, packing):
        rows = torch.tensor(index)
        all_rows = index == list(range(len(batch)))
        yield rows, trim(batch if all_rows else batch.rows(rows))


def _cut(batch: Batch, max_tokens: int, packing: row_packing.Packing) -> list[list[int]]:
    mask, width = batch["attention_mask"], batch["responses"].shape[1]
    lengths = mask.sum(1).tolist()
    padded = token_budget_batches(lengths, max_tokens)
    if not packing or not lengths:
        return padded
    prompts = mask[:, : mask.shape[1] - width].sum(1)
    ids, prompt_lengths = row_packing.left_align(batch).input_ids, prompts.tolist()
    groups = row_packing.same_prompts(ids, prompts)
    by_prompt = row_packing.prompt_tree(groups, prompt_lengths)
    positions = sum(len(rows) * max(lengths[i] for i in rows) for rows in padded)
    tree = row_packing.worthwhile_tree(ids, lengths, prompt_lengths, by_prompt)
    if tree is not None and row_packing.is_worthwhile(packing, tree.size(lengths), positions):
        return row_packing.prefix_tree_batches(tree, ids, lengths, prompt_lengths, max_tokens)
    if not row_packing.is_worthwhile(packing, by_prompt.size(lengths), positions):
        return padded
    return shared_prompt_batches(groups, lengths, prompt_lengths, max_tokens)


def trim(batch: Batch) -> Batch:
    """Drop the columns that are padding in every row; widths P and R shrink together."""
    mask, width = batch["attention_mask"], batch["responses"].shape[1]
    prompt_width = mask.shape[1] - width
    p = int(mask[:, :prompt_width].sum(1).max())
    r = max(1, int(mask[:, prompt_width:].sum(1).max()))
    tensors: dict[str, Tensor] = {}
    for name, value in batch.as_dict().items():
        axis = [*FIELDS[name].shape.split(), ""][1] if name in FIELDS else ""
        start = prompt_width - p if "P" in axis else 0
        stops = {"P+R": prompt_width + r, "P": prompt_width, "R": r}
        tensors[name] = value[:, start : stops[axis]] if axis in stops else value
    return Batch(tensors)


def untrimmed(
    batch: Batch, passes: Sequence[tuple[Tensor, Batch]], parts: Sequence[Tensor]
) -> Tensor:
    """`[b, P+R, K]` of each micro-batch as `[B, P+R, K]`: 0 where they were trimmed."""
    width, response = batch["input_ids"].shape[1], batch["responses"].shape[1]
    out = parts[0].new_zeros(len(batch), width, parts[0].shape[2])
    for (rows, micro), part in zip(passes, parts, strict=False):
        start = width - response - (part.shape[1] - micro["responses"].shape[1])
        out[rows, start : start + part.shape[1]] = part
    return out


@dataclass(frozen=True, slots=True)
class _Share:
    seqs: row_packing.Sequences
    positions: Tensor  # [b, L / sp] of its columns in the full sequences
    rows: row_packing.PackedRows | None  # the part of packed rows; None: they are padded


Metrics = dict[str, MeanAccumulator]
Loss = Callable[[Outputs, Batch], tuple[Tensor, Metrics]]


def init_mesh(layout: Layout, rank: int, world_size: int, address: str) -> Ranks:
    """This process's place in `layout`; `address`: where the ranks meet, "host:port"."""
    if layout.world_size > 1 and not dist.is_initialized():
        init_process_group(address, rank, world_size)
    return Ranks.form(layout, process_device().type)


def process_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def zero_loss(outputs: Outputs) -> Tensor:
    """A loss without gradient: its backward pass takes part in collectives, and does no more."""
    return torch.stack([value.sum() for value in outputs.values()]).sum() * 0.0


class ShardedModel:
    """This rank's shard of a model, and its passes; every layout has the same calls.

    `outputs` runs micro-batches without gradient. Training runs each one in `forward`, or all of
    them in `train_stages` where the model `has_stages`, then calls `all_reduce_gradients`; the
    loop is `TrainingWorker.accumulate`. A batch is this rank's rows, and a loss divides by the
    counts of all ranks' rows (`global_counts`). Ranks that differ in tp, sp or pp only have the
    same rows, compute the same loss and get the same outputs.
    """

    def __init__(
        self,
        model: nn.Module | UnloadedModel,
        ranks: Ranks,
        config: ParallelConfig,
        *,
        device: torch.device | None = None,
    ) -> None:
        """Shard `model` in place; every rank passes the same full, or unloaded, one.

        `device`: where the model is and stays; None moves it to this process's device.
        """
        self.ranks, self.config = ranks, config
        self.device = device or process_device()
        if isinstance(model, nn.Module) and device is None:
            model = model.to(self.device)
        self.module = apply_layout.apply_layout(model, ranks, config, self.device)
        self._pipeline: Pipeline | None = None  # the schedule of this rank's stage
        if ranks.size("pp") > 1:
            name = config.compute_dtype
            dtype = getattr(torch, name) if name else apply_layout.floating_dtype(self.module)
            width = self.module.config.hidden_size
            self._pipeline = Pipeline(self.module, ranks, width, dtype, self.device)
        self.offloads = (  # weights are in CPU memory between phases
            config.offload_params and not config.offload_policy and fsdp.shards_weights(ranks)
        )
        self._offloaded = fsdp.OffloadedWeights(self.module) if self.offloads else None
        self._adapters_off = self._packing_checked = False
        self.loss_scale: LossScale | None = None  # the optimizer's, where it has one

    def without_adapters(self) -> Self:
        """The same model with its adapters disabled: the base of a policy with adapters."""
        base = copy.copy(self)
        base._adapters_off = True
        return base

    def on_device(self) -> AbstractContextManager[object]:
        """Have the weights on the device in the block, where `offload_params` keeps them away.

        Passes and full tensors do so by themselves. An optimizer step and its passes are in one
        block: gradients are on the device.
        """
        return self._offloaded.on_device() if self._offloaded else nullcontext()

    def statistics(self) -> TokenStatistics:
        if self.ranks.size("tp") == 1:
            return token_statistics
        return VocabParallelStatistics.of(self.module.config.vocab_size, self.ranks.submesh("tp"))

    def micro_batches(
        self, batch: Batch, max_tokens: int, rows: Tensor | None = None
    ) -> list[tuple[Tensor, Batch]]:
        """`micro_batches` of the batch, or of its `rows`, row numbers being among them."""
        self._check_packing(batch)
        chosen = batch if rows is None else batch.rows(rows)
        return list(micro_batches(chosen, max_tokens, row_packing.packing_of(self.module)))

    def pad_passes(self, micros: Sequence[Batch], batch: Batch) -> list[Batch]:
        """`micros` on this rank's device, and dummies: all ranks run equally many passes."""
        self._check_packing(batch)
        passes = [self._to_device(micro) for micro in micros]
        if not fsdp.shards_weights(self.ranks):
            return passes
        missing = self.ranks.max_over(len(passes), DATA_AXES) - len(passes)
        return passes + [self._to_device(batch.rows([0])) for _ in range(missing)]

    @torch.no_grad()
    def outputs(
        self, batch: Batch, passes: Sequence[tuple[Tensor, Batch]], reader: OutputReader
    ) -> Outputs:
        """`reader`'s outputs `[B, R, …]` on the CPU; `passes` are row numbers and micro-batches."""
        shape, out = batch["responses"].shape, dict[str, Tensor]()
        micros = self.pad_passes([micro for _, micro in passes], batch)
        with self.on_device():
            for index, outputs in enumerate(self._outputs(micros, reader)):  # dummies too
                if index < len(passes):
                    rows, micro = passes[index]
                    for name, value in outputs.items():
                        if name not in out:
                            out[name] = torch.zeros((*shape, *value.shape[2:]), dtype=value.dtype)
                        out[name][rows, : micro["responses"].shape[1]] = value.cpu()
        return {name: out[name] if name in out else torch.zeros(shape) for name in reader.names()}

    def read(self, batch: Batch, max_tokens: int, reader: OutputReader) -> Outputs:
        """`outputs` of all rows, in micro-batches within the token budget."""
        return self.outputs(batch, self.micro_batches(batch, max_tokens), reader)

    def _outputs(self, micros: Sequence[Batch], reader: OutputReader) -> Iterator[Outputs]:
        """`reader`'s outputs `[b, R]` of each micro-batch, on this rank's device."""
        if self._pipeline is None:
            for micro in micros:
                with self.forward(micro, reader) as outputs:
                    yield outputs
            return
        shares, done = [self._share(micro) for micro in micros], dict[int, Outputs]()

        def read(index: int, hidden: Tensor) -> None:
            done[index] = self._read_hidden(reader, hidden, shares[index].seqs, micros[index])

        self._run_stages(shares, read, backward=False)
        group, last = self.ranks.group("pp"), self.ranks.size("pp") - 1
        for index, micro in enumerate(micros):
            outputs = done.get(index) or {
                name: torch.zeros(micro["responses"].shape, device=self.device)
                for name in reader.names()
            }
            for name in reader.names():
                dist.broadcast(outputs[name], group=group, group_src=last)
            yield outputs

    @property
    def has_stages(self) -> bool:
        return self._pipeline is not None

    @contextmanager
    def forward(self, micro: Batch, reader: OutputReader) -> Iterator[Outputs]:
        """`reader`'s outputs `[b, R]` of a micro-batch; its backward pass is in the block."""
        with self._forward_context(), reader.around(self.module, micro):
            if not self._shards_sequences:
                yield fsdp.run_forward(self.module, lambda: reader.from_model(self.module, micro))
                return

            def run() -> Outputs:
                hidden, seqs = self._hidden(micro)
                return reader.from_hidden(self.module, hidden, seqs, micro)

            yield self._sum_parts(fsdp.run_forward(self.module, run))

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scale is None else loss * self.loss_scale.value

    def train_stages(
        self, passes: Sequence[Batch], count: int, reader: OutputReader, loss: Loss
    ) -> list[Metrics]:
        """Run all passes, from `count` on dummies, forward and backward through the pipeline.

        Returns the metrics of `loss` on the last stage, none on others.
        """
        shares, parts = [self._share(micro) for micro in passes], list[Metrics]()

        def read(index: int, hidden: Tensor) -> Tensor:
            outputs = self._read_hidden(reader, hidden, shares[index].seqs, passes[index])
            if index >= count:
                return zero_loss(outputs)
            value, metrics = loss(outputs, passes[index])
            parts.append(metrics)
            return self.scaled(value)

        self._run_stages(shares, read, backward=True)
        return parts

    def all_reduce_gradients(self) -> None:
        """Sum the gradients over the ranks, where FSDP has not."""
        if self.ranks.layout.world_size == 1:
            return
        if not fsdp.shards_weights(self.ranks):
            trained = [p for p in self.module.parameters() if p.requires_grad]
            gradients.all_reduce_gradients(trained, self.ranks)
        if isinstance(self.module, stages.PipelineStage):
            stages.sum_tied_gradients(self.module, self.ranks)

    def logits(self, micro: Batch) -> Tensor:
        """This rank's logits `[N, V]` of the positions that its readers read."""
        self._check_packing(micro)

        def run() -> Tensor:
            if not self._shards_sequences:
                return forward.model_logits(self.module, row_packing.left_align(micro))
            hidden, seqs = self._hidden(micro)
            return require_vocabulary_head(self.module)(seqs.states(hidden))

        with torch.no_grad(), self._forward_context():
            return fsdp.run_forward(self.module, run)

    def any_rank_has(self, count: int) -> bool:
        return self.ranks.max_over(count, DATA_AXES) > 0

    def global_count(self, count: int) -> int:
        if self.ranks.group(*DATA_AXES) is None:
            return count
        return int(self.ranks.sum_over(torch.tensor(count, device=self.device), DATA_AXES))

    def global_counts(self, mask: Tensor) -> Denominators:
        """Denominators of `mask [B, T]` over all ranks' rows."""
        local = Denominators.from_mask(mask)
        counts = torch.tensor([local.tokens, local.sequences]).to(self.device, torch.float64)
        tokens, sequences = self.ranks.sum_over(counts, DATA_AXES).tolist()
        return Denominators(tokens, sequences, local.width)

    def all_reduce_metrics(self, parts: Sequence[Metrics]) -> Metrics:
        """The metrics of all ranks' micro-batches merged, on every rank."""
        local = merge(parts)
        group = self.ranks.group("pp", *DATA_AXES)
        if group is None:
            return local
        plain = {name: (type(s), float(s.total), float(s.count)) for name, s in local.items()}
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, plain, group=group)
        return merge(
            {
                name: kind(torch.tensor(total).double(), torch.tensor(count).double())
                for name, (kind, total, count) in metrics.items()
            }
            for metrics in gathered
        )

    def full_name(self, name: str) -> str:
        """The full model's name of this rank's parameter; of a tied copy the embedding's."""
        return self._tied_copies.get(name, name)

    def full_tensors(
        self, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Every (`wanted`) tensor of the full model; all ranks iterate to the end together."""
        with self.on_device():
            yield from gather_full_tensors(self.module, self.ranks, self._tied_copies, wanted)

    def load_full_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        with self.on_device():
            load_full_tensors(self.module, tensors, self.ranks, self._tied_copies)

    @property
    def _tied_copies(self) -> dict[str, str]:
        """This rank's copies of another stage's tensors, and their names there."""
        module = self.module
        if not isinstance(module, stages.PipelineStage) or not module.last:
            return {}
        embedding = f"{module.embedding_name}.weight"
        return dict.fromkeys(stages.tied_across_stages(module), embedding)

    def _check_packing(self, batch: Batch) -> None:
        """The first time, see that packed rows give what padded ones do; else pad from then on."""
        if self._packing_checked or not row_packing.packing_of(self.module):
            return
        self._packing_checked = True
        error = self._packing_error(apply_layout.check_sample(batch))
        apply_layout.accept(self.module, error, self.ranks, self.config)

    def _packing_error(self, sample: Batch) -> float:
        training = self.module.training
        self.module.eval()  # without dropout

        def run() -> float:
            if not self._shards_sequences and self._pipeline is None:
                return forward.packing_error(self.module, sample)
            return forward.distance(*(self._states(sample, packing) for packing in (True, False)))

        with torch.no_grad(), self._forward_context():
            error = run() if self.has_stages else fsdp.run_forward(self.module, run)
        self.module.train(training)
        return error

    def _to_device(self, micro: Batch) -> Batch:
        if self.device.type == "cpu":
            return micro
        return Batch({n: t.to(self.device) for n, t in micro.as_dict().items()}, micro.columns)

    def _read_hidden(
        self, reader: OutputReader, hidden: Tensor, seqs: row_packing.Sequences, micro: Batch
    ) -> Outputs:
        return self._sum_parts(reader.from_hidden(self.module, hidden, seqs, micro))

    def _sum_parts(self, local: Outputs) -> Outputs:
        return {name: sum_tokens(value, self.ranks) for name, value in local.items()}

    def _hidden(
        self, micro: Batch, packing: row_packing.Packing | None = None
    ) -> tuple[Tensor, row_packing.Sequences]:
        """Hidden states of this rank's part of the sequences, and the tokens in it."""
        share = self._share(micro, packing)
        if share.rows is None:
            hidden = forward.hidden_states(self.module, share.seqs, share.positions)
        else:
            body = row_packing.body_of(self.module)
            hidden = row_packing.packed_forward(body, share.rows).last_hidden_state
        return hidden, share.seqs

    def _states(self, sample: Batch, packing: row_packing.Packing) -> Tensor:
        """Hidden states [N, H] of all ranks' tokens, packed or not; of stages on the last one."""
        if self._pipeline is None:
            hidden, local = self._hidden(sample, packing)
        else:
            share, states = self._share(sample, packing), list[Tensor]()
            self._run_stages([share], lambda _, last: states.append(last), backward=False)
            if not states:
                return torch.zeros(0, 1)
            [hidden], local = states, share.seqs
        merged = hidden.new_zeros(*sample["responses"].shape, hidden.shape[-1])
        part, full = local.to(hidden.device), row_packing.left_align(sample).to(hidden.device)
        merged[part.rows, part.columns] = local.states(hidden)
        return sum_tokens(merged, self.ranks)[full.rows, full.columns]

    def _share(self, micro: Batch, packing: row_packing.Packing | None = None) -> _Share:
        seqs = row_packing.left_align(micro)
        rows = row_packing.pack(self.module, seqs, packing, multiple=self.ranks.size("sp", "tp"))
        if rows is not None:
            ids, positions = split_packed(rows.input_ids, rows.position_ids, self.ranks)
            places = rows.index(*(t.to(ids.device) for t in (seqs.rows, seqs.positions)))
            rows = replace(rows, input_ids=ids, position_ids=positions)
            seqs = seqs.to(ids.device)
        elif self._shards_sequences:
            ids, positions = split_tokens(seqs.input_ids, self.ranks)
            places = seqs.positions
        else:
            columns = torch.arange(seqs.input_ids.shape[1], device=seqs.input_ids.device)
            return _Share(seqs, columns[None], None)
        mine, columns = local_tokens(places, ids.shape[1], self.ranks)
        local = row_packing.Sequences(
            ids,
            seqs.rows[mine],
            columns,
            seqs.targets[mine],
            seqs.columns[mine],
            packed=rows is not None,
        )
        return _Share(local, positions, rows)

    def _run_stages(self, shares: Sequence[_Share], read: OnHidden, *, backward: bool) -> None:
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
        return self.ranks.size("sp") > 1

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        """Weights here, adapters off where they are to be; autocast, where FSDP doesn't cast."""
        module: Any = self.module
        adapters = BaseModelView(module).weights() if self._adapters_off else nullcontext()
        with self.on_device(), self._autocast(), adapters:
            yield

    def _autocast(self) -> AbstractContextManager[object]:
        if not self.config.compute_dtype or fsdp.shards_weights(self.ranks):
            return nullcontext()
        dtype = getattr(torch, self.config.compute_dtype)
        other = any(p.is_floating_point() and p.dtype != dtype for p in self.module.parameters())
        enabled = other and dtype != torch.float32
        return torch.autocast(self.device.type, dtype=dtype, enabled=enabled)


def sharded_optimizer(sharded: ShardedModel, config: OptimConfig, total_steps: int) -> Optimizer:
    """The optimizer of this rank's shard of a model, which gets its loss scale."""
    if sharded.config.offload_policy:  # a rank on a GPU may have one thread, and Adam is on the CPU
        torch.set_num_threads(max(torch.get_num_threads(), sharded.ranks.cores()))
    with sharded.on_device():
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
