"""Lossless compression of the difference between two versions of a tensor.

Elements are compared and added as integers of their width, so NaNs, signed zeros and all dtypes are
reproduced bit for bit. An update changes most elements by a few units in the last place, so a chunk
stores integer differences in the narrowest type that fits most of them. If few elements change,
their indices are stored too, as gaps or as a bitmap, whichever is smaller; if most change, the
differences of all elements are stored. Versions and checksums are in `weight_sync`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.errors import WeightSyncError

A = TypeVar("A", np.ndarray, Tensor)

CHUNK = 1 << 19  # elements in a chunk: bounds the memory of a comparison
_ESCAPE = 255  # in gaps: 255 unchanged elements; the next byte continues the gap
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HEADER = np.dtype(
    [
        ("tensor", "<u4"),
        ("start", "<u8"),
        ("count", "<u4"),
        ("itemsize", "u1"),
        ("encoding", "u1"),
        ("width", "u1"),
        ("indices", "<u4"),
        ("values", "<u4"),
        ("overflows", "<u4"),
    ]
)


class IndexEncoding(IntEnum):
    """How a chunk stores which of its elements have a difference."""

    ALL = 0  # not stored: every element has one, 0 where it is unchanged
    GAPS = 1  # the unchanged elements before each changed one, a byte per changed element
    BITMAP = 2  # one bit per element


@dataclass(frozen=True, slots=True)
class DeltaChunk:
    """The difference of elements `start` to `start + count` of one flattened tensor."""

    tensor: int  # index of the tensor among those sent, e.g. 3
    start: int
    count: int  # 1 … CHUNK
    itemsize: int  # bytes of an element: 1, 2, 4 or 8
    encoding: IndexEncoding
    width: int  # bytes of a difference; if below `itemsize`, its minimum marks an overflow
    indices: np.ndarray  # uint8: gaps, a bitmap, or empty
    values: np.ndarray  # uint8: differences, `width` bytes each
    overflows: np.ndarray  # uint8: differences too large for `width`, `itemsize` bytes each

    @property
    def nbytes(self) -> int:
        """Bytes when packed."""
        return int(_HEADER.itemsize + self.indices.size + self.values.size + self.overflows.size)


def integer_view(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as a flat tensor of integers of the same element size."""
    return tensor.view(-1).view(_INTEGERS[min(tensor.element_size(), 8)])


def encode(tensor: int, old: np.ndarray, new: np.ndarray, pool: Executor) -> Iterator[DeltaChunk]:
    """The chunks in which `new` differs from `old`, both integers `[n]`."""

    def chunk(start: int) -> DeltaChunk | None:
        return _encode(tensor, start, old[start : start + CHUNK], new[start : start + CHUNK])

    run = pool.map if old.size > CHUNK else map  # a thread costs more than a small tensor
    return (found for found in run(chunk, range(0, old.size, CHUNK)) if found is not None)


def _encode(tensor: int, start: int, old: np.ndarray, new: np.ndarray) -> DeltaChunk | None:
    changed = old != new
    many = int(np.count_nonzero(changed))
    if not many:
        return None
    where = np.flatnonzero(changed) if many < old.size // 4 else None
    with np.errstate(over="ignore"):  # wraps around, as the addition does
        if where is None:
            every = new - old
            some = every if many == old.size else every[changed]
        else:
            some = new[where] - old[where]
    overflow_counts = _count_overflows(some)
    width, sparse = _cheapest_width(overflow_counts, many, old.itemsize)
    all_width, dense = _cheapest_width(overflow_counts, old.size, old.itemsize)
    gaps, bitmap = many + old.size // _ESCAPE, -(-old.size // 8)
    if where is None and dense <= sparse + min(gaps, bitmap):
        encoding, width, some, indices = IndexEncoding.ALL, all_width, every, _bytes(every[:0])
    elif gaps <= bitmap:
        encoding = IndexEncoding.GAPS
        indices = _encode_gaps(np.flatnonzero(changed) if where is None else where)
    else:
        encoding, indices = IndexEncoding.BITMAP, np.packbits(changed, bitorder="little")
    values, overflows = _narrow(some, width)
    return DeltaChunk(
        tensor, start, old.size, old.itemsize, encoding, width, indices, values, overflows
    )


def apply_delta(chunks: Iterable[DeltaChunk], targets: Sequence[Tensor], pool: Executor) -> None:
    """Update tensors in place from the old version to the new one.

    `targets[i]` is the `integer_view` of tensor i, on any device.
    """
    for _ in pool.map(lambda chunk: _apply_chunk(chunk, targets[chunk.tensor]), chunks):
        pass  # re-raises an exception of a chunk


def _apply_chunk(chunk: DeltaChunk, target: Tensor) -> None:
    part, diff = target[chunk.start : chunk.start + chunk.count], _widen(chunk)
    where = None if chunk.encoding is IndexEncoding.ALL else _decode_indices(chunk)
    if part.device.type == "cpu":  # numpy: torch would start its own threads in every thread
        _add_at(part.numpy(), where, diff)
        return
    index = None if where is None else torch.from_numpy(where).to(part.device)
    _add_at(part, index, torch.from_numpy(diff).to(part.device))


def _add_at(part: A, where: A | None, diff: A) -> None:
    if where is None:
        part += diff
    else:
        part[where] += diff


def pack(chunks: Sequence[DeltaChunk]) -> Tensor:
    """Serialise chunks to bytes `[n]`, uint8."""
    headers = np.zeros(len(chunks), _HEADER)
    body: list[np.ndarray] = []
    for header, chunk in zip(headers, chunks, strict=True):
        for name in ("tensor", "start", "count", "itemsize", "encoding", "width"):
            header[name] = getattr(chunk, name)
        for name in ("indices", "values", "overflows"):
            header[name] = getattr(chunk, name).size
            body.append(getattr(chunk, name))
    length = np.array([len(chunks)], "<u8")
    return torch.from_numpy(np.concatenate([_bytes(length), _bytes(headers), *body]))


def unpack(data: Tensor) -> Iterator[DeltaChunk]:
    """Deserialise the chunks; raise WeightSyncError if `data` has the wrong length."""
    row = data.numpy()
    count = int(row[:8].view("<u8")[0]) if row.size >= 8 else -1
    at = 8 + count * _HEADER.itemsize
    if count < 0 or at > row.size:
        raise WeightSyncError(f"a delta of {row.size} bytes has no whole header")
    headers = row[8:at].view(_HEADER)
    sizes = np.array([headers[name] for name in ("indices", "values", "overflows")], np.int64)
    if at + int(sizes.sum()) != row.size:
        raise WeightSyncError(
            f"a delta of {row.size} bytes should have {at + int(sizes.sum())} by its header"
        )
    for header, (indices, values, overflows) in zip(headers, sizes.T.tolist(), strict=True):
        cuts = np.cumsum([at, indices, values, overflows])
        parts = [row[a:b] for a, b in pairwise(cuts)]
        at = int(cuts[-1])
        yield DeltaChunk(
            int(header["tensor"]),
            int(header["start"]),
            int(header["count"]),
            int(header["itemsize"]),
            IndexEncoding(int(header["encoding"])),
            int(header["width"]),
            *parts,
        )


def _count_overflows(diff: np.ndarray) -> dict[int, int]:
    """Number of differences that overflow each width; its minimum is reserved as the marker."""
    counts, width = {}, 1
    while width < diff.itemsize:
        counts[width] = int(np.count_nonzero(_overflow_mask(diff, diff.astype(f"<i{width}"))))
        if not counts[width]:
            return counts
        width *= 2
    return counts | {width: 0}


def _overflow_mask(diff: np.ndarray, narrow: np.ndarray) -> np.ndarray:
    """Mask of the differences that the narrow type can't represent, or that equal the marker."""
    mask: np.ndarray = narrow != diff
    mask |= narrow == np.iinfo(narrow.dtype).min
    return mask


def _cheapest_width(overflow_counts: dict[int, int], count: int, itemsize: int) -> tuple[int, int]:
    """The width with the fewest bytes for `count` differences, and those bytes."""
    costs = {width: count * width + many * itemsize for width, many in overflow_counts.items()}
    best = min(costs, key=costs.__getitem__)
    return best, costs[best]


def _narrow(diff: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    if width == diff.itemsize:
        return _bytes(diff), _bytes(diff[:0])
    values = diff.astype(f"<i{width}")
    mask = _overflow_mask(diff, values)
    values[mask] = np.iinfo(values.dtype).min
    return _bytes(values), _bytes(diff[mask])


def _widen(chunk: DeltaChunk) -> np.ndarray:
    """A chunk's differences in full width, as a new array."""
    narrow = chunk.values.view(f"<i{chunk.width}")
    diff = narrow.astype(f"<i{chunk.itemsize}")
    if chunk.width < chunk.itemsize:
        least = -(1 << (8 * chunk.width - 1))
        diff[narrow == least] = chunk.overflows.view(f"<i{chunk.itemsize}")
    return diff


def _encode_gaps(where: np.ndarray) -> np.ndarray:
    """Encode ascending indices as gaps of 0 … 254 unchanged elements; 255 escapes a longer gap."""
    gaps = np.diff(where, prepend=-1) - 1
    escapes, rest = np.divmod(gaps, _ESCAPE)
    ends = np.cumsum(escapes + 1)
    out = np.full(int(ends[-1]), _ESCAPE, np.uint8)
    out[ends - 1] = rest
    return out


def _decode_indices(chunk: DeltaChunk) -> np.ndarray:
    """Indices, int64, of a chunk's differences."""
    if chunk.encoding is IndexEncoding.BITMAP:
        bits = np.unpackbits(chunk.indices, count=chunk.count, bitorder="little")
        return np.flatnonzero(bits)
    ends = chunk.indices != _ESCAPE
    steps = chunk.indices + ends.astype(np.int64)
    return (np.cumsum(steps) - 1)[ends]


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)
