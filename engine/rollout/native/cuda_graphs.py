"""Decode steps in a few fixed shapes, so that a GPU can replay them as CUDA graphs.

A step of a small model is hundreds of short kernels, and launching them takes longer than running
them. A graph launches them at once, but it has one shape and fixed addresses. So the batch is
padded to a power of two and columns to a multiple of 128, and a shape is captured after it has come
up a few times. What a step computes is `llama_decoder.py`'s; on CPUs nothing is gained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor, int], Tensor]  # tokens [R], positions [R], columns → logits [R, V]
Replay = Callable[[], Tensor]
Capture = Callable[[Replay], Replay]

_COLUMNS = 128
_BEFORE_CAPTURE = 2  # a capture costs about three steps


class _Captured(NamedTuple):
    """A step of one shape, and where its inputs go; what `replay` gives the next one overwrites."""

    tokens: Tensor  # [R], int64
    positions: Tensor  # [R], int64
    replay: Replay


class GraphedSteps:
    """Runs steps over the first of `slots`, each in the next larger of a few shapes.

    A padding row feeds token 0 at position 0 to a free slot: what it writes there the slot's next
    sequence overwrites.
    """

    def __init__(self, step: Step, slots: int, columns: int, capture: Capture) -> None:
        """`columns`: most that a sequence has."""
        self._step, self._slots, self._max_columns = step, slots, columns
        self._capture = capture
        self.clear()

    def padded_columns(self, used: int) -> int:
        """Columns that a step runs over whose sequences use at most `used`."""
        return min(-(-used // _COLUMNS) * _COLUMNS, self._max_columns)

    def run(self, tokens: Tensor, positions: Tensor, columns: int) -> Tensor:
        """Logits `[R, V]` for `tokens` and `positions` `[R]`; read them before the next call."""
        rows = len(tokens)
        padded = min(1 << (rows - 1).bit_length(), self._slots)
        shape = padded, columns
        if shape not in self._captured and self._seen[shape] < _BEFORE_CAPTURE:
            self._seen[shape] += 1
            return self._step(tokens, positions, columns)
        found = self._captured.get(shape)
        # A capture runs the step once more: its inputs must be this step's, which changes nothing.
        into = (found.tokens, found.positions) if found else _two_like(padded, tokens)
        for buffer, values in zip(into, (tokens, positions), strict=True):
            buffer[:rows] = values
            buffer[rows:] = 0
        if found is None:
            replay = self._capture(lambda: self._step(*into, columns))
            found = self._captured[shape] = _Captured(*into, replay)
        return found.replay()[:rows]

    def clear(self) -> None:
        """Drop all graphs: weights or keys have another address now."""
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._seen: Counter[tuple[int, int]] = Counter()


def _two_like(length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    return like.new_empty(length), like.new_empty(length)


class CudaGraphs:
    """Captures functions of fixed shapes and addresses; all graphs share one pool of memory.

    Streams and captures are of the current device, so the model's is made that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Replay) -> Replay:
        with torch.cuda.device(self._device):
            graph, output = self._captured(function)

        def replay() -> Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return output

        return replay

    def _captured(self, function: Replay) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            function()  # libraries make their handles and workspaces now, not in the capture
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = function()
        return graph, output
