"""A policy's weights sent to processes with copies of it: whole, or what changed since the last.

The sender keeps what it sent last, bit for bit, and gives of every version the whole and a delta
against that (`delta`). A receiver takes a delta only onto the version it was made for, checks that
it came undamaged, and that what it has then is what the sender has. Where one of these fails it
says so (WeightSyncError) and refuses to sample until it gets the weights whole; so a lost, torn or
reordered delta costs a full sync and never mixes weights. Who sends what to whom is the
controller's; which tensors there are is `weights`' subject.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from engine.batch import Batch
from engine.errors import WeightSyncError, WorkerError
from engine.weight_transfer import delta

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Places:
    """Where each tensor lies in one row of bytes: one after the other, by name."""

    at: Mapping[str, tuple[int, int, int]]  # number, first byte, bytes
    size: int  # bytes of all
    header: bytes  # names, dtypes and shapes: what a digest of the bytes alone would not tell

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        at, size, lines = {}, 0, []
        for number, name in enumerate(sorted(tensors)):
            tensor = tensors[name]
            at[name] = (number, size, tensor.nbytes)
            size += tensor.nbytes
            lines.append(f"{name} {tensor.dtype} {list(tensor.shape)}\n")
        return cls(at, size, "".join(lines).encode())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of the weights, as it was sent."""

    version: int
    data: Tensor  # [bytes] uint8, on the CPU, never written again
    digest: bytes


class WeightSender:
    """What rollout processes are sent of the policy's weights.

    `dtype` is theirs, where it is not the policy's. With `deltas` a copy of the last weights is
    kept (pinned where there is a CUDA device).
    """

    def __init__(self, dtype: torch.dtype | None = None, *, deltas: bool = False) -> None:
        self._dtype, self._deltas = dtype, deltas
        self._places: Places | None = None
        self._last: Snapshot | None = None
        self._delta: Batch | None = None

    def send(self, named: Named, version: int) -> Batch:
        """The whole weights: `weights [1, bytes]` uint8 and `policy_version [1]`.

        `named` gives each tensor once, in the same names, shapes and dtypes every time. With deltas
        also `digest [1, 32]`, and the next `delta` is of these weights.
        """
        named = ((name, self._cast(tensor)) for name, tensor in named)
        if self._places is None:
            first = {name: tensor.cpu() for name, tensor in named}
            self._places, named = Places.of(first), first.items()
        data = torch.empty(
            self._places.size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
        )
        missing, pieces = set(self._places.at), list[delta.Piece]()
        with _threads() as pool:
            for name, tensor in named:
                number, start, size = self._places.at.get(name, (0, 0, -1))
                if name not in missing or size != tensor.nbytes:
                    raise WorkerError(
                        f"the policy's tensor {name!r} was not among those sent before, or had "
                        "another size; one sender serves one model"
                    )
                missing.remove(name)
                end = start + size
                data[start:end] = tensor.contiguous().view(-1).view(torch.uint8)
                if self._last is not None:
                    width = min(tensor.element_size(), 8)
                    old, new = (_integers(d[start:end], width) for d in (self._last.data, data))
                    pieces += delta.encode(number, old, new, pool)
        if missing:
            raise WorkerError(f"the policy came without its tensors {sorted(missing)}")
        whole = {"weights": data[None], "policy_version": torch.tensor([version])}
        if not self._deltas:
            return Batch(whole)
        base = self._last
        self._last = Snapshot(version, data, _digest(self._places.header, [data]))
        self._delta = _delta_batch(base, self._last, pieces)
        return Batch(whole | {"digest": _row(self._last.digest)})

    def delta(self) -> Batch:
        """What the last `send` changed, for those who have the weights of the one before.

        Each is given once. Where there is none, the batch says so, and no receiver takes it.
        """
        given, self._delta = self._delta, None
        version = self._last.version if self._last is not None else -1
        return given if given is not None else Batch({"no_delta": torch.tensor([version])})

    def _cast(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to(self._dtype) if tensor.is_floating_point() and self._dtype else tensor


class WeightReceiver:
    """What a process has of the actor's weights, and whether it may sample with them."""

    def __init__(self) -> None:
        self._version, self._digest = -1, b""
        self._refused = ""

    def load(self, tensors: Mapping[str, Tensor], sent: Batch) -> int:
        """Write what was sent into `tensors`, in place; return its version.

        Raises WeightSyncError, and refuses to sample from then on, where a whole sync is needed;
        WorkerError for weights of a model of another size.
        """
        try:
            if "weights" in sent:
                self._load_whole(tensors, sent)
            else:
                self._load_delta(tensors, sent)
        except BaseException as error:
            self._refused = str(error)
            self._version, self._digest = -1, b""
            raise
        self._refused = ""
        self._version = int(sent["policy_version"][0])
        self._digest = _bytes(sent["digest"]) if "digest" in sent else b""
        return self._version

    def check(self) -> None:
        """Raise WeightSyncError where the last weights that were sent could not be taken over."""
        if self._refused:
            raise WeightSyncError(
                f"this process samples nothing until it gets the weights whole: {self._refused}"
            )

    def _load_whole(self, tensors: Mapping[str, Tensor], sent: Batch) -> None:
        places, data = Places.of(tensors), sent["weights"][0]
        if places.size != data.numel():
            raise WorkerError(
                f"the actor sent {data.numel()} bytes of weights, this process's policy has "
                f"{places.size}; both must be built from the same model folder, dtype and adapters"
            )
        if "digest" in sent and _digest(places.header, [data]) != _bytes(sent["digest"]):
            raise WeightSyncError(
                "the weights were damaged on their way, or are of another model of the same size"
            )
        with torch.no_grad():
            for name, (_, start, size) in places.at.items():
                tensor = tensors[name]
                # A piece may start off the dtype's alignment; a copy of it does not.
                piece = data[start : start + size].clone()
                tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))

    def _load_delta(self, tensors: Mapping[str, Tensor], sent: Batch) -> None:
        if "delta" not in sent:
            raise WeightSyncError("the actor has no weights that it sent before; it started anew")
        if _checksum(sent) != _bytes(sent["checksum"]):
            raise WeightSyncError("a delta of the weights was damaged on its way")
        base = int(sent["base_version"][0])
        if (base, _bytes(sent["base_digest"])) != (self._version, self._digest):
            has = f"those of version {self._version}" if self._digest else "none to put it on"
            raise WeightSyncError(
                f"a delta is for weights of version {base}, this process has {has}: one was "
                "missed, or came from another sender"
            )
        row = [tensors[name].detach() for name in sorted(tensors)]
        own = [tensor.contiguous() for tensor in row]  # itself, unless it is a strided view
        with _threads() as pool:
            changes = delta.unpack(sent["delta"][0])
            delta.add(changes, [delta.integers(tensor) for tensor in own], pool)
        for tensor, contiguous in zip(row, own, strict=True):
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.copy_(contiguous)
        if _digest(Places.of(tensors).header, row) != _bytes(sent["digest"]):
            raise WeightSyncError(
                f"with the delta on them, this process's weights are not the actor's of version "
                f"{int(sent['policy_version'][0])}: they were changed here"
            )


def _delta_batch(base: Snapshot | None, last: Snapshot, pieces: list[delta.Piece]) -> Batch | None:
    if base is None:
        return None
    fields = {
        "delta": delta.pack(pieces)[None],
        "policy_version": torch.tensor([last.version]),
        "digest": _row(last.digest),
        "base_version": torch.tensor([base.version]),
        "base_digest": _row(base.digest),
    }
    sent = Batch(fields)
    return sent | {"checksum": _row(_checksum(sent))}


def _threads() -> ThreadPoolExecutor:
    """As many as torch may use in this process."""
    return ThreadPoolExecutor(torch.get_num_threads(), "weight-sync")


def _digest(header: bytes, tensors: Iterable[Tensor]) -> bytes:
    """Digest of tensors: their names, dtypes and shapes, then their bytes in order."""
    found = blake3(header, max_threads=torch.get_num_threads())
    for tensor in tensors:
        row = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        found.update(row.numpy().data)
    return found.digest()


def _checksum(sent: Batch) -> bytes:
    fields = ("delta", "policy_version", "digest", "base_version", "base_digest")
    return _digest(b"", (sent[name] for name in fields))


def _integers(row: Tensor, width: int) -> np.ndarray:
    """Bytes as integers; they may start anywhere."""
    return row.numpy().view(f"<i{width}")


def _row(digest: bytes) -> Tensor:
    return torch.tensor([list(digest)], dtype=torch.uint8)


def _bytes(row: Tensor) -> bytes:
    return bytes(row[0].tolist())
