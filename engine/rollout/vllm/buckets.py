"""Tensors through shared memory: a mapped file, filled by one process and read by others.

A bucket holds as many whole tensors as fit. What is done with them is not known here.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import RolloutError

_ALIGN = 64  # bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one tensor lies in a mapping."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # e.g. "bfloat16"
    start: int  # byte offset

    @property
    def nbytes(self) -> int:
        return _nbytes(self.shape, getattr(torch, self.dtype))


class Mapping:
    """A file in shared memory, mapped; `path` is there until `unlink`, the memory while this is."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._mmap = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.bytes: Tensor = torch.frombuffer(self._mmap, dtype=torch.uint8)

    @classmethod
    def create(cls, size: int) -> Mapping:
        """Make a new file of `size` bytes; RolloutError if there is no room for it."""
        shared = Path("/dev/shm")
        folder = shared if shared.is_dir() else Path(tempfile.gettempdir())
        descriptor, path = tempfile.mkstemp(prefix="hybridflyte-weights-", dir=folder)
        try:
            os.posix_fallocate(descriptor, 0, size)  # or a write may end the process (SIGBUS)
        except OSError as error:
            os.unlink(path)
            raise RolloutError(
                f"{folder} has no room for {size >> 20} MB of weights on their way to vLLM: "
                f"{error.strerror}; enlarge it (docker run --shm-size), or lower bucket_mb"
            ) from error
        finally:
            os.close(descriptor)
        return cls(path, size)

    def unlink(self) -> None:
        """Take the name away, once all who need it have opened it: nothing is left by a crash."""
        os.unlink(self.path)

    def read(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Tensor]]:
        """The tensors as views; valid until the file is written again."""
        for piece in pieces:
            data = self.bytes[piece.start : piece.start + piece.nbytes]
            yield piece.name, data.view(getattr(torch, piece.dtype)).view(piece.shape)

    def write(self, piece: Piece, tensor: Tensor) -> None:
        """Copy `tensor` to its place, cast to the piece's dtype."""
        [(_, view)] = self.read([piece])
        view.copy_(tensor)


def place(name: str, tensor: Tensor, dtype: torch.dtype, start: int) -> Piece:
    """Where `tensor` goes behind byte `start`; floating-point tensors are cast to `dtype`."""
    kept = dtype if tensor.is_floating_point() else tensor.dtype
    aligned = -(-start // _ALIGN) * _ALIGN
    return Piece(name, tuple(tensor.shape), str(kept).removeprefix("torch."), aligned)


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize
