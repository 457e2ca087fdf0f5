"""What changed between two versions of a tensor, in few bytes and bit for bit.

Numbers are compared and added as integers of their width, so NaNs, signed zeros and any dtype come
out as they went in. An update moves a number by few units in the last place, so what is written of
it is the integer difference, in as few bytes as hold most of them. Where few numbers change their
places are written too, as gaps or as a bitmap, whichever is smaller; where most do, all numbers
are. Here are bytes only; whose weights they are, and checksums, are `sync`'s subject.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import WeightSyncError

CHUNK = 1 << 19  # numbers in a piece: it bounds the memory that comparing takes
_ESCAPE = 255  # in gaps: 255 unchanged numbers, and the gap goes on
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HEADER = np.dtype(
    [
        ("tensor", "<u4"),
        ("start", "<u8"),
        ("count", "<u4"),
        ("itemsize", "u1"),
        ("form", "u1"),
        ("width", "u1"),
        ("places", "<u4"),
        ("values", "<u4"),
        ("wide", "<u4"),
    ]
)


class Form(IntEnum):
    """Which numbers of a piece have a difference."""

    ALL = 0  # all of them; those that stay have 0
    GAPS = 1  # after so many unchanged ones each, a byte a number
    BITMAP = 2  # where the bit is set, a bit a number


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` numbers of one tensor from its `start`th on."""

    tensor: int  # place of the tensor among those that are sent, e.g. 3
    start: int
    count: int  # 1 … CHUNK
    itemsize: int  # bytes of a number: 1, 2, 4 or 8
    form: Form
    width: int  # bytes of a difference; below `itemsize`, its least value means: look in `wide`
    places: np.ndarray  # uint8: gaps or bitmap, or nothing
    values: np.ndarray  # uint8: differences, `width` bytes each
    wide: np.ndarray  # uint8: differences that `width` can't hold, `itemsize` bytes each

    @property
    def nbytes(self) -> int:
        """Its size on the wire."""
        return int(_HEADER.itemsize + self.places.size + self.values.size + self.wide.size)


def integers(tensor: Tensor) -> Tensor:
    """A contiguous tensor's own storage as a row of integers as wide as its numbers."""
    return tensor.view(-1).view(_INTEGERS[min(tensor.element_size(), 8)])


def encode(tensor: int, old: np.ndarray, new: np.ndarray, pool: Executor) -> Iterator[Piece]:
    """The pieces in which `new` differs from `old`, integers `[n]` both."""

    def piece(start: int) -> Piece | None:
        return _encode(tensor, start, old[start : start + CHUNK], new[start : start + CHUNK])

    run = pool.map if old.size > CHUNK else map  # a thread costs more than a small tensor
    return (found for found in run(piece, range(0, old.size, CHUNK)) if found is not None)


def _encode(tensor: int, start: int, old: np.ndarray, new: np.ndarray) -> Piece | None:
    changed = old != new
    many = int(np.count_nonzero(changed))
    if not many:
        return None
    where = np.flatnonzero(changed) if many < old.size // 4 else None
    with np.errstate(over="ignore"):  # wraps, as adding it does
        if where is None:
            every = new - old
            some = every if many == old.size else every[changed]
        else:
            some = new[where] - old[where]
    misfits = _misfits(some)
    width, sparse = _narrowest(misfits, many, old.itemsize)
    all_width, dense = _narrowest(misfits, old.size, old.itemsize)
    gaps, bitmap = many + old.size // _ESCAPE, -(-old.size // 8)
    if where is None and dense <= sparse + min(gaps, bitmap):
        form, width, some, places = Form.ALL, all_width, every, _bytes(every[:0])
    elif gaps <= bitmap:
        form = Form.GAPS
        places = _gaps(np.flatnonzero(changed) if where is None else where)
    else:
        form, places = Form.BITMAP, np.packbits(changed, bitorder="little")
    values, wide = _narrow(some, width)
    return Piece(tensor, start, old.size, old.itemsize, form, width, places, values, wide)


def add(pieces: Iterable[Piece], targets: Sequence[Tensor], pool: Executor) -> None:
    """Bring the numbers of tensors from the old version to the new one.

    `targets[i]` are the `integers` of the tensor of number i, on any device.
    """
    for _ in pool.map(lambda piece: _add(piece, targets[piece.tensor]), pieces):
        pass  # raises what a piece did


def _add(piece: Piece, target: Tensor) -> None:
    part, diff = target[piece.start : piece.start + piece.count], _widen(piece)
    where = None if piece.form is Form.ALL else _places(piece)
    if part.device.type == "cpu":  # in numpy: torch would start threads of its own in each thread
        _add_at(part.numpy(), where, diff)
        return
    index = None if where is None else torch.from_numpy(where).to(part.device)
    _add_at(part, index, torch.from_numpy(diff).to(part.device))


def _add_at(part: Any, where: Any, diff: Any) -> None:
    if where is None:
        part += diff
    else:
        part[where] += diff


def pack(pieces: Sequence[Piece]) -> Tensor:
    """Pieces as one row of bytes `[n]`, uint8."""
    headers = np.zeros(len(pieces), _HEADER)
    body: list[np.ndarray] = []
    for header, piece in zip(headers, pieces, strict=True):
        for name in ("tensor", "start", "count", "itemsize", "form", "width"):
            header[name] = getattr(piece, name)
        for name in ("places", "values", "wide"):
            header[name] = getattr(piece, name).size
            body.append(getattr(piece, name))
    length = np.array([len(pieces)], "<u8")
    return torch.from_numpy(np.concatenate([_bytes(length), _bytes(headers), *body]))


def unpack(data: Tensor) -> Iterator[Piece]:
    """The pieces of a row of bytes; raise WeightSyncError for one that ends too early or late."""
    row = data.numpy()
    count = int(row[:8].view("<u8")[0]) if row.size >= 8 else -1
    at = 8 + count * _HEADER.itemsize
    if count < 0 or at > row.size:
        raise WeightSyncError(f"a delta of {row.size} bytes has no whole header")
    headers = row[8:at].view(_HEADER)
    sizes = np.array([headers[name] for name in ("places", "values", "wide")], np.int64)
    if at + int(sizes.sum()) != row.size:
        raise WeightSyncError(
            f"a delta of {row.size} bytes should have {at + int(sizes.sum())} by its header"
        )
    for header, (places, values, wide) in zip(headers, sizes.T.tolist(), strict=True):
        cuts = np.cumsum([at, places, values, wide])
        parts = [row[a:b] for a, b in pairwise(cuts)]
        at = int(cuts[-1])
        yield Piece(
            int(header["tensor"]),
            int(header["start"]),
            int(header["count"]),
            int(header["itemsize"]),
            Form(int(header["form"])),
            int(header["width"]),
            *parts,
        )


def _misfits(diff: np.ndarray) -> dict[int, int]:
    """How many differences can't be held, by bytes of a difference; its least value is taken."""
    counts, width = {}, 1
    while width < diff.itemsize:
        counts[width] = int(np.count_nonzero(_too_wide(diff, diff.astype(f"<i{width}"))))
        if not counts[width]:
            return counts
        width *= 2
    return counts | {width: 0}


def _too_wide(diff: np.ndarray, narrow: np.ndarray) -> np.ndarray:
    """Which differences are not, or must not be, what they are when cut to the narrow type."""
    misfits: np.ndarray = narrow != diff
    misfits |= narrow == np.iinfo(narrow.dtype).min
    return misfits


def _narrowest(misfits: dict[int, int], shown: int, itemsize: int) -> tuple[int, int]:
    """Bytes of a difference that cost least where `shown` are written, and what they cost."""
    costs = {width: shown * width + many * itemsize for width, many in misfits.items()}
    best = min(costs, key=costs.__getitem__)
    return best, costs[best]


def _narrow(diff: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    if width == diff.itemsize:
        return _bytes(diff), _bytes(diff[:0])
    values = diff.astype(f"<i{width}")
    misfits = _too_wide(diff, values)
    values[misfits] = np.iinfo(values.dtype).min
    return _bytes(values), _bytes(diff[misfits])


def _widen(piece: Piece) -> np.ndarray:
    """A piece's differences in full width, as an array of its own."""
    narrow = piece.values.view(f"<i{piece.width}")
    diff = narrow.astype(f"<i{piece.itemsize}")
    if piece.width < piece.itemsize:
        least = -(1 << (8 * piece.width - 1))
        diff[narrow == least] = piece.wide.view(f"<i{piece.itemsize}")
    return diff


def _gaps(where: np.ndarray) -> np.ndarray:
    """Ascending places as gaps: 0 … 254 unchanged numbers before each, after 255 an escape."""
    gaps = np.diff(where, prepend=-1) - 1
    escapes, rest = np.divmod(gaps, _ESCAPE)
    ends = np.cumsum(escapes + 1)
    out = np.full(int(ends[-1]), _ESCAPE, np.uint8)
    out[ends - 1] = rest
    return out


def _places(piece: Piece) -> np.ndarray:
    """The places, int64, that a piece's differences belong to."""
    if piece.form is Form.BITMAP:
        bits = np.unpackbits(piece.places, count=piece.count, bitorder="little")
        return np.flatnonzero(bits)
    ends = piece.places != _ESCAPE
    steps = piece.places + ends.astype(np.int64)
    return (np.cumsum(steps) - 1)[ends]


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)
