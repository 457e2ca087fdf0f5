"""Micro-batches through the stages of a model, one rank a stage, forward and backward (1F1B).

The order of passes and messages is torch.distributed.pipelining's: 1F1B (Narayanan et al.,
arXiv:1806.03377; it keeps at most as many micro-batches' activations as there are stages), or GPipe
for fewer micro-batches than stages. Each micro-batch travels in its own shape: nothing is padded to
the widest, and a buffer lives only while its micro-batch is on this stage. Which layers a stage has
is in `pipeline_stages`; the caller computes the loss from the last one's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from engine.errors import WorkerError
from engine.parallel.fsdp import reshard
from engine.parallel.process_groups import Ranks

OnHidden = Callable[[int, Tensor], Tensor | None]


class Pipeline:
    """This rank's stage, connected to those before and after it.

    `stage(ids [b, L])` on the first rank of the axis `pp`, `stage(hidden [b, L, hidden_size])` on
    the others, gives hidden states [b, L, hidden_size] of `dtype` (the last stage's may be of any).
    """

    def __init__(
        self,
        stage: nn.Module,
        ranks: Ranks,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._stage, self._ranks = stage, ranks
        self._like = torch.empty(0, 0, hidden_size, dtype=dtype, device="meta")
        self._device = device
        self._scheduled: dict[tuple[int, bool], _ScheduledStage] = {}

    def run(
        self,
        inputs: Sequence[Tensor],
        read: OnHidden,
        *,
        backward: bool,
        positions: Sequence[Tensor] | None = None,
        segments: Sequence[object] | None = None,
    ) -> None:
        """Send micro-batches `inputs`, token ids [b_i, L_i], through all stages.

        Every rank of the pipeline gets the same shapes; the first one's ids are read, and
        `positions` [b_i, L_i] on all, if rows don't start at position 0; `segments` are those of
        packed rows, None for a micro-batch of padded ones. On the last stage
        `read(i, hidden)` is called once a micro-batch, in order. With `backward` it returns the
        scalar loss, or None where there is none, and the gradients of all losses' SUM are added to
        the parameters'; they are never averaged. Without, nothing is recorded for gradients.

        Ranks that share weights (FSDP) must come with equally many micro-batches: fill up with one
        token, `torch.zeros(1, 1)`, whose loss is None. With FSDP gathered weights and whole
        gradients are kept until the last micro-batch, then reduced.

        Raises WorkerError, caused by what went wrong, on a rank that fails; the others do within
        their process group's timeout.
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
                scheduled.run(inputs, read, positions, segments)
        except Exception as error:
            cause = _cause(error)
            index, stages = self._ranks.index("pp"), self._ranks.size("pp")
            raise WorkerError(
                f"stage {index} of pp={stages} failed on {len(inputs)} micro-batches: "
                f"{type(cause).__name__}: {cause}"
            ) from cause
        if not backward:
            reshard(self._stage)  # gathered weights would outlive the next update
        self._scheduled[key] = scheduled


class _ScheduledStage(PipelineStage):
    """This rank's stage, with a schedule for so many micro-batches.

    torch is given empty messages, whose shapes never change; a message's real buffer is allocated
    when it is about to be received, and freed after use. Methods of torch that this overrides are
    checked by tests/engine/parallel/test_torch_internals.py.
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
        self._read: OnHidden = _nothing
        kind = Schedule1F1B if count >= self.num_stages else ScheduleGPipe
        self._schedule = kind(self, count, self._loss if backward else None, scale_grads=False)

    def run(
        self,
        inputs: Sequence[Tensor],
        read: OnHidden,
        positions: Sequence[Tensor] | None,
        segments: Sequence[object] | None,
    ) -> None:
        """Run all micro-batches; see `Pipeline.run`."""
        self._inputs, self._read = inputs, read
        self._positions, self._segments = positions, segments
        self._schedule.step(target=torch.arange(self._count), return_outputs=False)
        self.clear_runtime_states()
        self._inputs, self._read = (), _nothing
        self._positions = self._segments = None

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
            self._read(fwd_chunk_id, hidden)
        return hidden

    def _loss(self, hidden: Tensor, number: Tensor) -> Tensor:
        """What to go backward from; of gradient 0 where the micro-batch has no loss."""
        loss = self._read(int(number), hidden)
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
        """Leave alone what a shape inference would have left behind: with FSDP, the gradients.

        There is no inference here, and the gradients are those of earlier runs.
        """

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


def _nothing(number: int, hidden: Tensor) -> None:
    """What is read between runs."""


def _cause(error: Exception) -> BaseException:
    """The error itself, out of the library's RuntimeError about which chunk it was."""
    return error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
