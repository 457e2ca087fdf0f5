"""Shared memory: mapped files that weights travel in, and the names of vLLM's own.

A bucket holds as many whole tensors as fit; one process writes it and others read it. vLLM leaves
named memory behind on every exit, and all of it when a process is killed, so names are unlinked
once all its processes have mapped it: memory without a name ends with its last process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import RolloutError

_ALIGN = 64  # bytes


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """Where one tensor lies in a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # e.g. "bfloat16"
    start: int  # byte offset

    @property
    def nbytes(self) -> int:
        return _nbytes(self.shape, getattr(torch, self.dtype))


class SharedBuffer:
    """A mapped file in shared memory; `path` is there until `unlink`."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._mmap = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.bytes: Tensor = torch.frombuffer(self._mmap, dtype=torch.uint8)

    @classmethod
    def create(cls, size: int) -> SharedBuffer:
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
        """Remove the name, once all readers have opened it: a crash then leaves nothing behind."""
        os.unlink(self.path)

    def read(self, entries: Iterable[BucketEntry]) -> Iterator[tuple[str, Tensor]]:
        """The tensors as views; valid until the file is written again."""
        for piece in entries:
            data = self.bytes[piece.start : piece.start + piece.nbytes]
            yield piece.name, data.view(getattr(torch, piece.dtype)).view(piece.shape)

    def write(self, piece: BucketEntry, tensor: Tensor) -> None:
        """Copy `tensor` to its place, cast to the piece's dtype."""
        [(_, view)] = self.read([piece])
        view.copy_(tensor)


def bucket_entry(name: str, tensor: Tensor, dtype: torch.dtype, start: int) -> BucketEntry:
    """The entry of `tensor` from byte `start` on; floating-point tensors are cast to `dtype`."""
    kept = dtype if tensor.is_floating_point() else tensor.dtype
    aligned = -(-start // _ALIGN) * _ALIGN
    return BucketEntry(name, tuple(tensor.shape), str(kept).removeprefix("torch."), aligned)


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize


def unlink_group_names() -> None:
    """Unlink the memory of this process's tensor-parallel group; its first rank does so for all."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.rank_in_group:
        return
    unlink_queue_name(group.mq_broadcaster)
    sums = getattr(group.device_communicator, "dist_module", None)
    if (name := getattr(sums, "group_name", None)) is not None:
        for rank in range(group.world_size):
            Path("/dev/shm", f"{name}_{rank}").unlink(missing_ok=True)


def unlink_queue_name(queue: object) -> None:
    """Unlink the memory of one of vLLM's message queues, if it has any."""
    buffer = getattr(queue, "buffer", None)
    if buffer is not None:
        with suppress(FileNotFoundError):
            buffer.shared_memory.unlink()
        buffer.is_creator = False  # vLLM would unlink it once more
