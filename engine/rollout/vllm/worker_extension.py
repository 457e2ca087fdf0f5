"""What runs in vLLM's worker processes: loading weights from shared memory into the live model.

vLLM imports this module in each worker process, before it makes the model, and adds the methods
below to its worker. No method raises: of several workers' answers vLLM reads only those up to the
first error, and would take the rest for answers to its next call. So an error is an answer.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import wraps

from torch import Tensor

from engine.rollout.vllm import engine_launch, engine_weights, patches, weight_load
from engine.rollout.vllm.engine_weights import BucketEntry, SharedBuffer
from engine.rollout.vllm.vllm_types import ModelRunner
from engine.rollout.vllm.weight_load import WeightLoad, begin_load

if os.environ.get(engine_launch.WORKER_MARK):  # set for the workers alone, by `engine_launch`
    _for_good = patches.weights_unpacked()  # a name, as a collected one would undo itself
    _for_good.__enter__()
    patches.skip_compilation()


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
