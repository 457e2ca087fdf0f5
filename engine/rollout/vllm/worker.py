"""What runs in vLLM's worker processes: taking weights from shared memory into the live model.

vLLM imports this module in each worker process, before it makes the model, and adds the methods
below to its worker. No method raises: of several workers' answers vLLM reads only those up to the
first error, and would take the rest for answers to its next call. So an error is an answer.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from engine.rollout.vllm import adapters, kernels, process, shared_memory
from engine.rollout.vllm.buckets import Mapping, Piece
from engine.rollout.vllm.weights import Loading

if os.environ.get(process.WORKER_MARK):  # set for the workers alone, by `launch.py`
    kernels.keep_weights_plain()
    kernels.compile_nothing()


def _answered(method: Callable[..., None]) -> Callable[..., str | None]:
    """Return None, or the error as text."""

    @wraps(method)
    def answer(*args: Any, **kwargs: Any) -> str | None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(last.filename)}:{last.lineno}"
            return f"{type(error).__name__} at {place}: {error}"
        return None

    return answer


class WorkerExtension:
    """Methods for `collective_rpc`, those of an update in order: begin, take …, finish."""

    model_runner: Any
    _mapping: Mapping
    _loading: Loading
    _adapter: dict[str, Tensor]

    @_answered
    def forget_names(self) -> None:
        """Leave no named shared memory."""
        shared_memory.forget_group_names()

    @_answered
    def weights_open(self, path: str, size: int) -> None:
        """Map the file that weights come in."""
        self._mapping = Mapping(path, size)

    @_answered
    def weights_begin(self) -> None:
        """Expect weights of the model."""
        self._loading = Loading(self.model_runner.get_model())

    @_answered
    def weights_take(self, pieces: list[Piece]) -> None:
        """Load this rank's slices of the tensors in the file."""
        self._loading.load(self._mapping.read(pieces))

    @_answered
    def weights_finish(self, whole: bool) -> None:
        """End the update; with `whole`, check that the model came whole."""
        if whole:
            self._loading.check_whole()

    @_answered
    def adapter_begin(self) -> None:
        """Expect an adapter."""
        self._adapter = {}

    @_answered
    def adapter_take(self, pieces: list[Piece]) -> None:
        """Keep the tensors in the file."""
        self._adapter |= {name: tensor.clone() for name, tensor in self._mapping.read(pieces)}

    @_answered
    def adapter_finish(self, config: dict[str, Any]) -> None:
        """Decode with the adapter that came."""
        adapters.swap(self, self._adapter, config)
        self._adapter = {}
