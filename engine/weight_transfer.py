"""Transfer of a policy's weights to processes with a copy of it: in full, or as a delta.

A delta has the integer differences between two versions of each tensor, compressed by zstd:
elements are compared and added as integers of their width, so NaNs, signed zeros and all dtypes are
reproduced bit for bit. An update changes elements by a few units in the last place, if at all.

The sender keeps a bit-exact copy of the last version that it sent, and makes of every version the
full weights and a delta to that copy. A receiver applies a delta only to the version it was
computed from, and verifies checksums of the delta and of the resulting weights. If a check fails,
it raises WeightSyncError and refuses to sample until it receives full weights: a lost, damaged or
reordered delta costs a full sync and never mixes versions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Literal, Self

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from engine.batch import Batch
from engine.errors import WeightSyncError, WorkerError

CHUNK = 1 << 19  # elements in a chunk: bounds the memory of a comparison
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HEADER = np.dtype(
    [("tensor", "<u4"), ("start", "<u8"), ("count", "<u4"), ("itemsize", "u1"), ("size", "<u4")]
)


@dataclass(frozen=True, slots=True)
class DeltaChunk:
    """The difference of elements `start` to `start + count` of one flattened tensor."""

    tensor: int  # index of the tensor among those sent, e.g. 3
    start: int
    count: int  # 1 … CHUNK
    itemsize: int  # bytes of an element: 1, 2, 4 or 8
    content: np.ndarray  # uint8: the differences, compressed where that is smaller


@cache
def _zstd() -> Any:
    """Load pyarrow's codec; higher levels cost time and gain nothing here."""
    import pyarrow  # not in every worker process: 0.1 s, for deltas alone

    return pyarrow.Codec("zstd", compression_level=1)


def integer_view(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as a flat tensor of integers of the same element size."""
    return tensor.view(-1).view(_INTEGERS[min(tensor.element_size(), 8)])


def encode(tensor: int, old: np.ndarray, new: np.ndarray, pool: Executor) -> Iterator[DeltaChunk]:
    """Yield the chunks in which `new` differs from `old`, both integers `[n]`."""

    def chunk(start: int) -> DeltaChunk | None:
        old_chunk, new_chunk = old[start : start + CHUNK], new[start : start + CHUNK]
        if np.array_equal(old_chunk, new_chunk):
            return None
        content = _compressed(new_chunk, old_chunk)
        return DeltaChunk(tensor, start, old_chunk.size, old_chunk.itemsize, content)

    run = pool.map if old.size > CHUNK else map  # a thread costs more than a small tensor
    return (delta for delta in run(chunk, range(0, old.size, CHUNK)) if delta is not None)


def _compressed(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Encode `new - old`, which wraps around, as uint8: lowest bytes first, highest bytes last.

    Zigzag coding (0, -1, 1, -2 → 0, 1, 2, 3) makes the high bytes of small differences 0.
    """
    with np.errstate(over="ignore"):
        difference = new - old
    zigzag = (difference << 1) ^ (difference >> (8 * new.itemsize - 1))
    planes = np.ascontiguousarray(_bytes(zigzag).reshape(-1, new.itemsize).T).reshape(-1)
    packed = np.frombuffer(_zstd().compress(planes, asbytes=False), np.uint8)
    return packed if packed.size < planes.size else planes


def _difference(chunk: DeltaChunk) -> np.ndarray:
    """Decode a chunk's differences, as a new array of signed integers."""
    planes, size = chunk.content, chunk.count * chunk.itemsize
    if planes.size < size:
        planes = np.frombuffer(_zstd().decompress(planes, size), np.uint8)
    by_element = np.empty((chunk.count, chunk.itemsize), np.uint8)
    for index, plane in enumerate(planes.reshape(chunk.itemsize, -1)):
        by_element[:, index] = plane
    zigzag = by_element.reshape(-1).view(f"<u{chunk.itemsize}")
    sign = (zigzag & 1).view(f"<i{chunk.itemsize}")
    difference: np.ndarray = (zigzag >> 1).view(f"<i{chunk.itemsize}")
    difference ^= np.negative(sign, out=sign)
    return difference


def apply_delta(chunks: Iterable[DeltaChunk], targets: Sequence[Tensor], pool: Executor) -> None:
    """Update in place, from the old version, `targets`: the `integer_view` of each tensor."""
    for _ in pool.map(lambda chunk: _apply_chunk(chunk, targets[chunk.tensor]), chunks):
        pass  # re-raises an exception of a chunk


def _apply_chunk(chunk: DeltaChunk, target: Tensor) -> None:
    part, difference = target[chunk.start : chunk.start + chunk.count], _difference(chunk)
    if part.device.type == "cpu":  # numpy: torch would start its own threads in every thread
        elements = part.numpy()
        elements += difference
    else:
        part += torch.from_numpy(difference).to(part.device)


def pack(chunks: Sequence[DeltaChunk]) -> Tensor:
    """Serialise chunks to bytes `[n]`, uint8."""
    headers = np.array(
        [(c.tensor, c.start, c.count, c.itemsize, c.content.size) for c in chunks], _HEADER
    )
    length = np.array([len(chunks)], "<u8")
    body = [chunk.content for chunk in chunks]
    return torch.from_numpy(np.concatenate([_bytes(length), _bytes(headers), *body]))


def unpack(data: Tensor) -> Iterator[DeltaChunk]:
    """Deserialise the chunks; raise WeightSyncError if `data` has the wrong length."""
    row = data.numpy()
    count = int(row[:8].view("<u8")[0]) if row.size >= 8 else -1
    at = 8 + count * _HEADER.itemsize
    if count < 0 or at > row.size:
        raise WeightSyncError(f"a delta of {row.size} bytes has no whole header")
    headers = row[8:at].view(_HEADER).tolist()
    total = at + sum(size for *_, size in headers)
    if total != row.size:
        raise WeightSyncError(f"a delta of {row.size} bytes should have {total} by its header")
    for tensor, start, chunk_count, itemsize, size in headers:
        yield DeltaChunk(tensor, start, chunk_count, itemsize, row[at : at + size])
        at += size


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Offsets of tensors that are concatenated to one buffer of bytes, in order of their names."""

    spans: Mapping[str, tuple[int, int, int]]  # index, first byte, number of bytes
    size: int  # bytes of the buffer
    header: bytes  # names, dtypes and shapes; part of the digest

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        spans, size, lines = {}, 0, []
        for index, name in enumerate(sorted(tensors)):
            tensor = tensors[name]
            spans[name] = (index, size, tensor.nbytes)
            size += tensor.nbytes
            lines.append(f"{name} {tensor.dtype} {list(tensor.shape)}\n")
        return cls(spans, size, "".join(lines).encode())


@dataclass(frozen=True, slots=True)
class SentWeights:
    """One version of the weights as sent."""

    version: int
    data: Tensor  # [bytes] uint8, on the CPU, read-only
    digest: Tensor  # [1, 32] uint8


class WeightSender:
    """Serialises the policy's weights for rollout processes.

    `dtype`: the rollout dtype, where it differs from the policy's. With `deltas` a copy of the last
    weights is kept (in pinned memory where there is a CUDA device).
    """

    def __init__(self, dtype: torch.dtype | None = None, *, deltas: bool = False) -> None:
        self.dtype, self._deltas = dtype, deltas
        self._layout: FlatLayout | None = None
        self._last: SentWeights | None = None
        self._delta: Batch | None = None

    def send(self, named: Named, version: int) -> Batch:
        """Return the full weights: `weights [1, bytes]` uint8 and `policy_version [1]`.

        `named` yields each tensor once, with the same names, shapes and dtypes in every call. With
        deltas also `digest [1, 32]`; the next `delta` leads to these weights.
        """
        named = ((name, self._cast(tensor)) for name, tensor in named)
        if self._layout is None:
            first = {name: tensor.cpu() for name, tensor in named}
            self._layout, named = FlatLayout.of(first), first.items()
        data = torch.empty(
            self._layout.size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
        )
        missing, chunks = set(self._layout.spans), list[DeltaChunk]()
        with _threads() as pool:
            for name, tensor in named:
                index, start, size = self._layout.spans.get(name, (0, 0, -1))
                if name not in missing or size != tensor.nbytes:
                    raise WorkerError(
                        f"the policy's tensor {name!r} was not among those sent before, or had "
                        "another size; one sender serves one model"
                    )
                missing.remove(name)
                end = start + size
                data[start:end] = tensor.contiguous().view(-1).view(torch.uint8)
                if self._last is not None:
                    integer = f"<i{min(tensor.element_size(), 8)}"  # viewed at any alignment
                    versions = (self._last.data, data)
                    old, new = (version[start:end].numpy().view(integer) for version in versions)
                    chunks += encode(index, old, new, pool)
        if missing:
            raise WorkerError(f"the policy lacks its tensors {sorted(missing)}")
        full = {"weights": data[None], "policy_version": torch.tensor([version])}
        if not self._deltas:
            return Batch(full)
        base = self._last
        self._last = SentWeights(version, data, _digest(self._layout.header, [data]))
        self._delta = None if base is None else _delta_batch(base, self._last, chunks)
        return Batch(full | {"digest": self._last.digest})

    def delta(self) -> Batch:
        """Return the delta of the last `send` to the one before it.

        Each is returned once. Without one the batch has `no_delta [1]` and receivers reject it.
        """
        batch, self._delta = self._delta, None
        version = self._last.version if self._last is not None else -1
        return batch if batch is not None else Batch({"no_delta": torch.tensor([version])})

    def _cast(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to(self.dtype) if tensor.is_floating_point() and self.dtype else tensor


class WeightReceiver:
    """Loads what a `WeightSender` sent; knows the version and whether it may be sampled with."""

    def __init__(self) -> None:
        self._version, self._digest = -1, torch.empty(0)
        self._failure = ""

    def load(self, tensors: Mapping[str, Tensor], sent: Batch) -> int:
        """Load the sent weights into `tensors`, in place; return their version.

        Raises WeightSyncError where a full sync is needed, and `check` fails until then;
        WorkerError for weights of a model of another size.
        """
        try:
            if "weights" in sent:
                self._load_full(tensors, sent)
            else:
                self._load_delta(tensors, sent)
        except BaseException as error:
            self._failure = str(error)
            self._version, self._digest = -1, torch.empty(0)
            raise
        self._failure = ""
        self._version = int(sent["policy_version"][0])
        self._digest = sent["digest"] if "digest" in sent else torch.empty(0)
        return self._version

    def check(self) -> None:
        """Raise WeightSyncError if the last `load` failed."""
        if self._failure:
            raise WeightSyncError(
                f"this process samples nothing until it receives the full weights: {self._failure}"
            )

    def _load_full(self, tensors: Mapping[str, Tensor], sent: Batch) -> None:
        layout, data = FlatLayout.of(tensors), sent["weights"][0]
        if layout.size != data.numel():
            raise WorkerError(
                f"the actor sent {data.numel()} bytes of weights, this process's policy has "
                f"{layout.size}; both must be built from the same model folder, dtype and adapters"
            )
        if "digest" in sent and not torch.equal(_digest(layout.header, [data]), sent["digest"]):
            raise WeightSyncError(
                "the weights were damaged on their way, or are of another model of the same size"
            )
        with torch.no_grad():
            for name, (_, start, size) in layout.spans.items():
                tensor = tensors[name]
                # A slice may be misaligned for the dtype; its copy is aligned.
                aligned = data[start : start + size].clone()
                tensor.copy_(aligned.view(tensor.dtype).view(tensor.shape))

    def _load_delta(self, tensors: Mapping[str, Tensor], sent: Batch) -> None:
        if "delta" not in sent:
            raise WeightSyncError("the actor has no weights that it sent before; it was restarted")
        if not torch.equal(_checksum(sent), sent["checksum"]):
            raise WeightSyncError("a delta of the weights was damaged on its way")
        base = int(sent["base_version"][0])
        if base != self._version or not torch.equal(sent["base_digest"], self._digest):
            has = f"version {self._version}" if self._digest.numel() else "none"
            raise WeightSyncError(
                f"a delta is for weights of version {base}, this process has {has}: one was "
                "missed, or came from another sender"
            )
        row = [tensors[name].detach() for name in sorted(tensors)]
        targets = [tensor.contiguous() for tensor in row]  # itself, unless it is a strided view
        with _threads() as pool:
            apply_delta(unpack(sent["delta"][0]), list(map(integer_view, targets)), pool)
        for tensor, target in zip(row, targets, strict=True):
            if target.data_ptr() != tensor.data_ptr():
                tensor.copy_(target)
        if not torch.equal(_digest(FlatLayout.of(tensors).header, row), sent["digest"]):
            raise WeightSyncError(
                f"with the delta on them, this process's weights are not the actor's of version "
                f"{int(sent['policy_version'][0])}: they were changed here"
            )


Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True, slots=True)
class BroadcastRound:
    """A broadcast to several samplers at once, as one process has it (`rollout.vllm`).

    Its members meet in a TCPStore that the controller serves. vLLM's worker i has rank `rank + i`.
    """

    host: str  # of the store
    port: int
    number: int  # of the round, from 1
    group: int  # number of the first round with the same members
    names: tuple[str, ...]  # by receiving rank - 1: of its sampler, e.g. ("sampler0", "sampler0")
    rank: int  # 0: the sender
    backend: Backend
    version: int  # of the weights
    deadline_s: float  # for any one wait

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return 1 + len(self.names)

    def label(self, rank: int) -> str:
        """The name of a rank in messages."""
        return f"{self.names[rank - 1]} (rank {rank})" if rank else "the trainer"

    def open_store(self) -> PrefixStore:
        """Connect to the store, to the keys of this round; one who waits holds a connection."""
        wait = timedelta(seconds=self.deadline_s)
        store = TCPStore(self.host, self.port, None, False, wait, wait_for_workers=False)
        return PrefixStore(f"round{self.number}", store)


def end_round(store: PrefixStore, cause: str) -> None:
    """End a round for all its members; the first cause counts."""
    store.compare_set("cause", "", cause)


def _delta_batch(base: SentWeights, last: SentWeights, chunks: list[DeltaChunk]) -> Batch:
    fields = {
        "delta": pack(chunks)[None],
        "policy_version": torch.tensor([last.version]),
        "digest": last.digest,
        "base_version": torch.tensor([base.version]),
        "base_digest": base.digest,
    }
    sent = Batch(fields)
    return sent | {"checksum": _checksum(sent)}


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "weight-sync")


def _digest(header: bytes, tensors: Iterable[Tensor]) -> Tensor:
    """Digest [1, 32] uint8 of tensors: names, dtypes and shapes, then their bytes in order."""
    digest = blake3(header, max_threads=torch.get_num_threads())
    for tensor in tensors:
        row = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(row.numpy().data)
    return torch.tensor([list(digest.digest())], dtype=torch.uint8)


def _checksum(sent: Batch) -> Tensor:
    fields = ("delta", "policy_version", "digest", "base_version", "base_digest")
    return _digest(b"", (sent[name] for name in fields))
