"""Pipeline parallelism: which layers each stage has, and micro-batches through the stages (1F1B).

A stage is extracted from a full model; its parameters keep their names. The order of passes and
messages is torch.distributed.pipelining's: 1F1B (Narayanan et al., arXiv:1806.03377; at most as
many micro-batches' activations as there are stages), or GPipe for fewer micro-batches than stages.
Each micro-batch travels in its own shape: nothing is padded to the widest.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchPipelineStage
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig
from transformers.integrations.peft import PeftAdapterMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from engine.errors import ConfigError, WorkerError
from engine.parallel.decoder_plan import FAMILIES, DecoderPlan
from engine.parallel.fsdp import reshard
from engine.parallel.gradients import redistribute_gradients, zero_gradient
from engine.parallel.layout import ModelShape
from engine.parallel.process_groups import Ranks


def split_layers(layers: int, stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Assign `layers` to `stages` in order, to minimise the heaviest stage.

    `first` and `last` are what the end stages carry besides, in layers' worth. Each stage gets one
    layer at least. Raises ConfigError when there are too few.

    >>> split_layers(8, 3, last=2.0)
    [range(0, 3), range(3, 6), range(6, 8)]
    """
    if not 1 <= stages <= layers:
        raise ConfigError(
            f"pp={stages} stages can't be made of {layers} layers; choose pp from 1 to {layers}"
        )
    loads = [1.0] * stages
    loads[0] += first
    loads[-1] += last
    counts = [1] * stages
    for _ in range(layers - stages):
        lightest = loads.index(min(loads))
        loads[lightest] += 1
        counts[lightest] += 1
    starts = [sum(counts[:stage]) for stage in range(stages + 1)]
    return [range(starts[stage], starts[stage + 1]) for stage in range(stages)]


def layers_by_stage(shape: ModelShape, stages: int) -> list[range]:
    """Return the layers of each stage of a model, the head's work weighed against a layer's."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate
    return split_layers(shape.layers, stages, last=shape.vocab * shape.hidden / layer)


class PipelineStage(nn.Module, PeftAdapterMixin):
    """A run of a decoder's layers; the first stage has the embedding too, the last norm and head.

    `forward(ids [B, L] long)` on the first, `forward(hidden [B, L, H])` on the others, returns
    hidden states [B, L, H], normed on the last. Rows start at column 0 and have their padding last:
    causal attention alone keeps it out. `position_ids` [B, L] are for a share of longer rows, and
    for packed ones, [1, T], which `segments` keep apart.
    """

    def __init__(
        self, config: PretrainedConfig, index: int, stages: int, decoder: str, head: str
    ) -> None:
        super().__init__()
        self.config, self.index, self.stages = config, index, stages
        self._plan = DecoderPlan.of(config)
        self.first, self.last = index == 0, index == stages - 1
        self._decoder_name, self._head_name = decoder, head
        self.tied: tuple[str, ...] = ()  # see `tied_across_stages`
        self._tied_alike = False  # whether the other end was asked how it keeps its copy

    @property
    def _decoder(self) -> Any:
        return self.get_submodule(self._decoder_name)

    @property
    def layers(self) -> list[nn.Module]:
        """This stage's decoder layers, in order."""
        return list(self._decoder.layers.values())

    @property
    def layer_numbers(self) -> list[int]:
        """Their numbers in the whole model."""
        return [int(number) for number in self._decoder.layers]

    @property
    def rotary_emb(self) -> nn.Module:
        """The table of rotary positions, which every stage has, as a decoder has it."""
        return self._decoder.rotary_emb

    @property
    def embedding_name(self) -> str:
        """The embedding's name in the whole model."""
        return f"{self._decoder_name}.{self._plan.embedding}"

    def get_input_embeddings(self) -> nn.Module | None:
        """Return the embedding; None on all stages but the first."""
        return self.get_submodule(self.embedding_name) if self.first else None

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the head, a critic's value head too; None on all stages but the last."""
        return self.get_submodule(self._head_name) if self.last else None

    def forward(
        self, inputs: Tensor, position_ids: Tensor | None = None, segments: object = None
    ) -> Tensor:
        decoder = self._decoder
        hidden = self._embed(inputs) if self.first else inputs
        # The width is read from the inputs: between them, modules may share out the columns.
        if position_ids is None:
            position_ids = torch.arange(inputs.shape[1], device=inputs.device)[None]
        rotary = self._rotary(hidden, position_ids)
        masks = self._masks(hidden.dtype, inputs, segments is not None)
        packed = {} if segments is None else {"segments": segments}
        for number, layer in zip(self.layer_numbers, self.layers, strict=True):
            layer_type = self._layer_type(number)
            hidden = layer(
                hidden,
                attention_mask=masks[layer_type],
                position_embeddings=rotary[layer_type],
                position_ids=position_ids,
                past_key_values=None,
                use_cache=False,
                **packed,
            )
        if not self.last:
            return hidden.contiguous()
        for name in self._plan.after:
            hidden = decoder.get_submodule(name)(hidden)
        return hidden

    def _embed(self, ids: Tensor) -> Tensor:
        """Embed token ids; Granite scales the embeddings, StarCoder2 drops some out."""
        hidden = ids
        for name in self._plan.before:
            hidden = self._decoder.get_submodule(name)(hidden)
        hidden = hidden * getattr(self.config, "embedding_multiplier", 1.0)
        dropout = getattr(self.config, "embedding_dropout", 0.0)
        return nn.functional.dropout(hidden, dropout, self.training)

    def _rotary(self, hidden: Tensor, position_ids: Tensor) -> dict[str, object]:
        """Compute cosines and sines by type of layer; only Gemma 3's differ."""
        kinds = {self._layer_type(number) for number in self.layer_numbers}
        rotary = self.rotary_emb
        if hasattr(rotary, "layer_types"):
            return {kind: rotary(hidden, position_ids, kind) for kind in kinds}
        return dict.fromkeys(kinds, rotary(hidden, position_ids))

    def _layer_type(self, number: int) -> str:
        """Return the type of a layer's attention, from the configuration."""
        layer_types = getattr(self.config, "layer_types", None)
        if layer_types is not None:
            return str(layer_types[number])
        window = getattr(self.config, "sliding_window", None)
        return "full_attention" if window is None else "sliding_attention"

    def _masks(self, dtype: torch.dtype, inputs: Tensor, packed: bool) -> dict[str, object]:
        """Make attention masks by type of layer; None where the kernel is causal by itself."""
        kinds = {self._layer_type(number) for number in self.layer_numbers}
        if packed:  # attention over segments reads none
            return dict.fromkeys(kinds, inputs.new_zeros(1, 1, 1, 1))
        make = {
            "full_attention": create_causal_mask,
            "sliding_attention": create_sliding_window_causal_mask,
        }
        shape = (*inputs.shape[:2], 1)  # only dtype and the first two sizes are read
        like = torch.empty(1, dtype=dtype, device=inputs.device).expand(shape)
        options: dict[str, Any] = {"attention_mask": None, "past_key_values": None}
        return {kind: make[kind](self.config, inputs_embeds=like, **options) for kind in kinds}


def extract_stage(model: Any, stage: int, stages: int) -> PipelineStage:
    """Extract one stage of a full causal language model, or critic of a `backbone` and a `head`.

    The stage shares the model's modules: drop `model` to free those of other stages. A matrix that
    is embedding and head is on the first and the last. Raises ConfigError for others than
    `FAMILIES`.
    """
    critic = hasattr(model, "backbone")
    base: Any = model.backbone if critic else model.base_model
    config = base.config
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"a model of type {config.model_type!r} can't be cut into pp={stages} stages, only "
            f"{', '.join(FAMILIES)} can; set pp to 1 and shard it by fsdp"
        )
    layers = layers_by_stage(ModelShape.of(config), stages)[stage]
    names = ("backbone", "head") if critic else (model.base_model_prefix, "lm_head")
    part = PipelineStage(config, stage, stages, *names)
    plan, decoder = DecoderPlan.of(config), nn.Module()
    for name in plan.before if part.first else ():
        decoder.add_module(name, base.get_submodule(name))
    decoder.layers = nn.ModuleDict({str(number): base.layers[number] for number in layers})
    for name in plan.after if part.last else ():
        decoder.add_module(name, base.get_submodule(name))
    decoder.rotary_emb = base.rotary_emb
    part.add_module(names[0], decoder)
    if part.last:
        part.add_module(names[1], model.get_submodule(names[1]))
    ends = () if critic else (model.get_input_embeddings(), model.get_output_embeddings())
    tied = len({getattr(end, "weight", None) for end in ends}) == 1
    if tied and stages > 1 and (part.first or part.last):
        part.tied = (f"{part.embedding_name if part.first else names[1]}.weight",)
    if getattr(model, "peft_config", None):  # adapters are switched on the stage as on the model
        part.peft_config = model.peft_config
        part._hf_peft_config_loaded = True
    return part.train(model.training)


def tied_across_stages(stage: nn.Module) -> set[str]:
    """Return names of this stage's parameters of which another stage has a copy: none, or one."""
    return set(stage.tied) if isinstance(stage, PipelineStage) else set()


def tied_duplicates(stage: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that a global gradient norm finds in another stage already."""
    if not isinstance(stage, PipelineStage) or stage.first:
        return set()
    return {stage.get_parameter(name) for name in stage.tied}


@torch.no_grad()
def sum_tied_gradients(stage: PipelineStage, ranks: Ranks) -> None:
    """Add up the gradients of a tied matrix's two copies, in both, to the same bits.

    Every rank of the first and the last stage calls it, after its gradients are whole otherwise and
    before they are clipped. Raises WorkerError where the copies are not sharded alike.
    """
    for name in stage.tied:
        parameter = stage.get_parameter(name)
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = zero_gradient(parameter)
        redistribute_gradients([parameter])
        mine = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        if not stage._tied_alike:
            _require_alike(parameter.grad, mine, name, ranks)
            stage._tied_alike = True
        mine.add_(_swap(mine, ranks))


def _require_alike(gradient: Tensor, local: Tensor, name: str, ranks: Ranks) -> None:
    """Raise WorkerError unless the other copy is sharded as this one is."""
    placements = gradient.placements if isinstance(gradient, DTensor) else ()
    placed = f"{tuple(gradient.shape)} as {placements}, here {tuple(local.shape)} {local.dtype}"
    mark = torch.tensor([zlib.crc32(placed.encode())], device=local.device)
    if int(_swap(mark, ranks)) != int(mark):
        raise WorkerError(
            f"the gradient of {name!r}, tied to a matrix in another stage, is {placed}, and its "
            "counterpart is not; shard embedding and head alike, or untie them"
        )


def _swap(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Send `tensor` to the pipeline's other end; return what comes from there."""
    group, other_end = ranks.group("pp"), ranks.size("pp") - 1 - ranks.index("pp")
    tensor, received = tensor.contiguous(), torch.empty_like(tensor).contiguous()
    sends = dist.P2POp(dist.isend, tensor, group=group, group_peer=other_end)
    receives = dist.P2POp(dist.irecv, received, group=group, group_peer=other_end)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()
    return received


OnHidden = Callable[[int, Tensor], Tensor | None]


class Pipeline:
    """This rank's stage, connected to those before and after it.

    `stage(ids [b, L])` on the first rank of the axis `pp`, `stage(hidden [b, L, width])` on the
    others, gives hidden states [b, L, width] of `dtype` (the last stage's may be of any).
    """

    def __init__(
        self, stage: nn.Module, ranks: Ranks, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._stage, self._ranks = stage, ranks
        self._like = torch.empty(0, 0, width, dtype=dtype, device="meta")
        self._device = device
        self._scheduled: dict[tuple[int, bool], _ScheduledStage] = {}

    def run(
        self,
        inputs: Sequence[Tensor],
        on_hidden: OnHidden,
        *,
        backward: bool,
        positions: Sequence[Tensor] | None = None,
        segments: Sequence[object] | None = None,
    ) -> None:
        """Send micro-batches `inputs`, token ids [b_i, L_i], through all stages.

        Every rank of the pipeline gets the same shapes; the first one's ids are read, and
        `positions` [b_i, L_i] on all, if rows don't start at position 0; `segments` are those of
        packed rows, None for a micro-batch of padded ones. On the last stage
        `on_hidden(i, hidden)` is called once a micro-batch, in order. With `backward` it returns
        the scalar loss, or None where there is none, and the gradients of all losses' SUM are added
        to the parameters'. Without, nothing is recorded for gradients.

        Ranks that share weights (FSDP) must come with equally many micro-batches: fill up with one
        token, `torch.zeros(1, 1)`, whose loss is None. They keep gathered weights and whole
        gradients until the last one. Raises WorkerError, caused by what went wrong, on a rank that
        fails; on the others within their process group's timeout.
        """
        if not inputs:
            return
        key = len(inputs), backward
        scheduled = self._scheduled.pop(key, None)
        try:
            if scheduled is None:
                parts = self._stage, self._ranks, self._like, self._device
                scheduled = _ScheduledStage(*parts, *key)
            with torch.set_grad_enabled(backward):
                scheduled.run(inputs, on_hidden, positions, segments)
        except Exception as error:
            # Out of the library's RuntimeError about which chunk it was.
            cause = (error.__cause__ if type(error) is RuntimeError else None) or error
            index, stages = self._ranks.index("pp"), self._ranks.size("pp")
            raise WorkerError(
                f"stage {index} of pp={stages} failed on {len(inputs)} micro-batches: "
                f"{type(cause).__name__}: {cause}"
            ) from cause
        if not backward:
            reshard(self._stage)  # gathered weights would outlive the next update
        self._scheduled[key] = scheduled


class _ScheduledStage(TorchPipelineStage):
    """This rank's stage, with a schedule for so many micro-batches.

    torch is given empty messages, whose shapes never change; a message's real buffer is allocated
    when it is about to be received, and freed after use. What this overrides of torch is checked by
    tests/engine/parallel/test_process_groups.py.
    """

    def __init__(
        self,
        stage: nn.Module,
        ranks: Ranks,
        like: Tensor,
        device: torch.device,
        count: int,
        backward: bool,
    ) -> None:
        message = like.clone().requires_grad_(backward)
        super().__init__(
            stage,
            ranks.index("pp"),
            ranks.size("pp"),
            device,
            input_args=message,
            output_args=message,
            group=ranks.group("pp"),
        )
        self._runtime_validate = False  # against the empty shapes; `_check` has the real ones
        self._like, self._count = like, count
        self._inputs: Sequence[Tensor] = ()
        self._positions: Sequence[Tensor] | None = None
        self._segments: Sequence[object] | None = None
        self._on_hidden: OnHidden = lambda number, hidden: None
        schedule = Schedule1F1B if count >= self.num_stages else ScheduleGPipe
        self._schedule = schedule(self, count, self._loss if backward else None, scale_grads=False)

    def run(
        self,
        inputs: Sequence[Tensor],
        on_hidden: OnHidden,
        positions: Sequence[Tensor] | None,
        segments: Sequence[object] | None,
    ) -> None:
        """Run all micro-batches; see `Pipeline.run`."""
        self._inputs, self._on_hidden = inputs, on_hidden
        self._positions, self._segments = positions, segments
        self._schedule.step(target=torch.arange(self._count), return_outputs=False)
        self.clear_runtime_states()
        self._inputs, self._positions, self._segments = (), None, None
        self._on_hidden = lambda number, hidden: None

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Tensor, ...],
        kwargs: dict[str, object] | None = None,
        save_forward_output: bool = True,
    ) -> Tensor:
        if self.is_first:
            args = (self._inputs[fwd_chunk_id].to(self.device),)
        if self._positions is not None:
            kwargs = {"position_ids": self._positions[fwd_chunk_id].to(self.device)}
        if self._segments is not None:
            kwargs = (kwargs or {}) | {"segments": self._segments[fwd_chunk_id]}
        hidden = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if not self.is_last:
            self._check(hidden, fwd_chunk_id)
        elif not self.has_backward:
            self._on_hidden(fwd_chunk_id, hidden)
        return hidden

    def _loss(self, hidden: Tensor, number: Tensor) -> Tensor:
        """Return the loss; its gradient is 0 where the micro-batch has none."""
        loss = self._on_hidden(int(number), hidden)
        if loss is None or not loss.requires_grad:
            return hidden.flatten()[:0].sum()
        return loss.clone()  # not a view, so that it can be detached

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:
            loss.detach_()  # the schedule keeps it, and its graph would keep what was received

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make_buffer(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
            _drop_buffer(self.args_recv_info[fwd_chunk_id])
        return operations

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._make_buffer(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward:
            return []
        if not self.is_first:
            (gradient,) = self.bwd_cache[bwd_chunk_id]
            if gradient is None:
                gradient = torch.zeros(
                    self._shape(bwd_chunk_id), dtype=self._like.dtype, device=self.device
                )
            self.bwd_cache[bwd_chunk_id] = (gradient.contiguous(),)
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        _drop_buffer(self.args_recv_info[bwd_chunk_id])
        _drop_buffer(self.grad_recv_info[bwd_chunk_id])
        return operations

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:  # else FSDP would reduce gradients that no pass has made
            super().perform_reduce_grad(grad_scale_factor)

    def _post_metadata_inference_cleanup(self) -> None:
        """Keep gradients: there is no shape inference here, and they are those of earlier runs."""

    def _shape(self, number: int) -> tuple[int, ...]:
        return (*self._inputs[number].shape, self._like.shape[-1])

    def _make_buffer(self, received: tuple[Any, ...], number: int) -> None:
        for info in received:
            if not info.is_root_arg:
                shape = self._shape(number)
                info.buffer = torch.empty(shape, dtype=self._like.dtype, device=self.device)

    def _check(self, hidden: Tensor, number: int) -> None:
        """Raise WorkerError for hidden states that the next stage does not expect."""
        shape = self._shape(number)
        if tuple(hidden.shape) != shape or hidden.dtype != self._like.dtype:
            raise WorkerError(
                f"a stage gave hidden states {list(hidden.shape)} of {hidden.dtype} where the next "
                f"one awaits {list(shape)} of {self._like.dtype}; make the Pipeline with the size "
                "and dtype that the stages compute in"
            )


def _drop_buffer(received: tuple[Any, ...]) -> None:
    for info in received:
        info.buffer = None
