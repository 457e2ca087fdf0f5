"""What runs in vLLM's workers: loading weights from shared memory, or from a trainer's broadcast.

vLLM imports this module in each worker process, before it makes the model, and adds the methods of
`WorkerExtension` to its worker. None of them raises: of several workers' answers vLLM reads only
those up to the first error, and would take the rest for answers to its next call. So an error is an
answer.
"""

import os
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from engine.errors import WeightSyncError
from engine.rollout.vllm import engine_launch, engine_weights, patches, weight_load
from engine.rollout.vllm.engine_weights import BucketEntry, SharedBuffer
from engine.rollout.vllm.options import WEIGHT_TRANSFER
from engine.rollout.vllm.vllm_types import ModelRunner
from engine.rollout.vllm.weight_broadcast import Member
from engine.rollout.vllm.weight_load import Named, StagedWeights, WeightLoad, begin_load
from engine.weight_transfer import BroadcastRound
from engine.worker_process import on_daemon_thread

if os.environ.get(engine_launch.WORKER_MARK):  # set for the workers alone, by `engine_launch`
    _for_good = patches.weights_unpacked()  # a name, as a collected one would undo itself
    _for_good.__enter__()
    patches.skip_compilation()


_DRAIN_S = 60.0  # for a round that its sender has ended


class BroadcastEngine(WeightTransferEngine[BroadcastRound, BroadcastRound]):
    """vLLM's end of a broadcast: a copy on the host receives it while the model decodes."""

    init_info_cls = update_info_cls = BroadcastRound
    supports_draft_weight_update = False
    defers_processing = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._member, self._staged = Member(), None  # type: Member, StagedWeights | None
        self._receiving: Future[None] | None = None

    def init_transfer_engine(self, init_info: BroadcastRound) -> None:
        """Each round says which group it is of, and is joined when it begins."""

    def start_weight_update(self) -> None:
        """A copy needs no preparation."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to receive a round; the model stays as it is until `finish_weight_update`."""
        before, broadcast = self._receiving, self.parse_update_info(update_info)

        def receive() -> None:
            if before is not None and not wait([before], broadcast.deadline_s).done:
                raise WeightSyncError(f"the round before has not ended in {broadcast.deadline_s} s")
            self.receive_weights(broadcast)

        self._receiving = on_daemon_thread(receive)

    @torch.no_grad()
    def receive_weights(self, update_info: BroadcastRound) -> None:
        """Receive a whole round into the copy."""
        stream = None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            stream = torch.cuda.Stream()
        loads: list[WeightLoad] = []

        def load(named: Named) -> None:
            if not loads:  # here, so that a host without room is the round's cause
                self._staged = self._staged or StagedWeights(self.model)
                loads.append(WeightLoad(self._staged.module, self.vllm_config))
            loads[0].load(named)

        with torch.cuda.stream(stream):
            self._member.receive(update_info, update_info.rank + self.parallel_config.rank, load)
        loads[0].finish(complete=True)

    def drain_pending(self) -> None:
        """Wait for the round that `update_weights` began; raise what it raised."""
        assert self._receiving is not None, "update_weights comes first"
        self._receiving.result(timeout=_DRAIN_S)

    def finish_weight_update(self) -> None:
        """Copy the weights received to where the model has its own."""
        self.drain_pending()
        assert self._staged is not None
        self._staged.copy_to(self.model)

    def shutdown(self) -> None:
        self._member.close()


WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER, BroadcastEngine)


def _answered(method: Callable[..., None]) -> Callable[..., str | None]:
    """Return None, or the error as text."""

    @wraps(method)
    def answer(*args: object, **kwargs: object) -> str | None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            location = f"{os.path.basename(last.filename)}:{last.lineno}"
            return f"{type(error).__name__} at {location}: {error}"
        return None

    return answer


class WorkerExtension:
    """Methods for `collective_rpc`, those of an update in order: begin, load …, finish."""

    model_runner: ModelRunner
    weight_transfer_engine: BroadcastEngine
    _buffer: SharedBuffer
    _loading: WeightLoad
    _adapter: dict[str, Tensor]

    @_answered
    def unlink_names(self) -> None:
        engine_weights.unlink_group_names()

    @_answered
    def weights_open(self, path: str, size: int) -> None:
        self._buffer = SharedBuffer(path, size)

    @_answered
    def weights_begin(self) -> None:
        self._loading = begin_load(self.model_runner)

    @_answered
    def weights_load(self, entries: list[BucketEntry]) -> None:
        self._loading.load(self._buffer.read(entries))

    @_answered
    def weights_finish(self, complete: bool) -> None:
        self._loading.finish(complete)

    @_answered
    def adapter_begin(self) -> None:
        self._adapter = {}

    @_answered
    def adapter_load(self, entries: list[BucketEntry]) -> None:
        self._adapter |= {name: tensor.clone() for name, tensor in self._buffer.read(entries)}

    @_answered
    def adapter_finish(self, config: dict[str, object]) -> None:
        weight_load.load_adapter(self, self._adapter, config)
        self._adapter = {}

    @_answered
    def transfer(self, step: str, *arguments: object) -> None:
        getattr(self.weight_transfer_engine, step)(*arguments)
