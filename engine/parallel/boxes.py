"""Boxes: index ranges in every dimension of a tensor, their intersections and differences.

A rank's shard of a parameter is a box in the full tensor. Pure values; no torch, no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Index = tuple[int, ...]  # one number per dimension


@dataclass(frozen=True, slots=True)
class Box:
    """The elements from `offset` up to `offset + size`, in each dimension.

    >>> Box((2, 0), (2, 8)).intersect(Box((3, 4), (9, 9)))
    Box(offset=(3, 4), size=(1, 4))
    """

    offset: Index  # e.g. (1536, 0)
    size: Index  # e.g. (768, 1536)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        """How many elements there are in it."""
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """The elements of both; None if there are none."""
        offset, size = [], []
        for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True):
            start = a if a > b else b
            length = min(a + m, b + n) - start
            if length <= 0:
                return None
            offset.append(start)
            size.append(length)
        return Box(tuple(offset), tuple(size))

    def subtract(self, other: Box) -> list[Box]:
        """The elements that are not in `other`, as boxes that don't overlap."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.elements else []
        rest = []
        offset, size = list(self.offset), list(self.size)
        for d in range(len(size)):
            before = common.offset[d] - offset[d]
            after = offset[d] + size[d] - common.offset[d] - common.size[d]
            for start, length in (
                (offset[d], before),
                (common.offset[d] + common.size[d], after),
            ):
                if length:
                    rest.append(
                        Box(
                            (*offset[:d], start, *offset[d + 1 :]),
                            (*size[:d], length, *size[d + 1 :]),
                        )
                    )
            offset[d], size[d] = common.offset[d], common.size[d]
        return rest

    def start_in(self, outer: Box, at: Index) -> Index:
        """Where this box begins in a storage that has `outer`'s first element at index `at`."""
        return tuple(s + a - b for s, a, b in zip(at, self.offset, outer.offset, strict=True))


def chunk(box: Box, dim: int | None, parts: int, index: int) -> Box:
    """Part `index` of `box` along `dim`, cut as torch.chunk does: the last ones short or empty."""
    if dim is None or parts == 1 or not box.size:
        return box
    width = math.ceil(box.size[dim] / parts)
    start = min(index * width, box.size[dim])
    length = min(width, box.size[dim] - start)
    return Box(
        (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :]),
        (*box.size[:dim], length, *box.size[dim + 1 :]),
    )


def subtract_all(box: Box, others: Iterable[Box]) -> list[Box]:
    """The elements of `box` that none of `others` has, as boxes that don't overlap."""
    left = [box] if box.elements else []
    for other in others:
        left = [rest for part in left for rest in part.subtract(other)]
    return left


def disjoint_boxes(
    holders: Iterable[tuple[Box, Iterable[int]]],
) -> list[tuple[Box, tuple[int, ...]]]:
    """Split boxes with holders into boxes that don't overlap, each with all its holders, sorted.

    >>> disjoint_boxes([(Box((0,), (4,)), [0]), (Box((2,), (2,)), [1])])
    [(Box(offset=(0,), size=(2,)), (0,)), (Box(offset=(2,), size=(2,)), (0, 1))]
    """
    same: dict[Box, set[int]] = {}
    for box, ranks in holders:
        if box.elements:
            same.setdefault(box, set()).update(ranks)
    done: list[tuple[Box, set[int]]] = []
    active: list[tuple[Box, set[int]]] = []  # those that a later box, sorted by offset, may overlap
    for box in sorted(same, key=lambda b: (b.offset, b.size)):
        ranks, met, fresh = same[box], [], [box]
        for tile, holding in active:
            common = tile.intersect(box)
            if common is None:
                met.append((tile, holding))
                continue
            met.append((common, holding | ranks))
            met.extend((part, holding) for part in tile.subtract(box))
            fresh = [rest for part in fresh for rest in part.subtract(common)]
        met.extend((part, ranks) for part in fresh)
        active = []
        for tile, holding in met:
            ended = bool(tile.size) and tile.offset[0] + tile.size[0] <= box.offset[0]
            (done if ended else active).append((tile, holding))
    ordered = sorted(done + active, key=lambda pair: (pair[0].offset, pair[0].size))
    return [(tile, tuple(sorted(holding))) for tile, holding in ordered]


def flat_range(size: Index, start: int, stop: int) -> list[Box]:
    """The elements `start` to `stop` of a row-major walk through a box, as boxes in order.

    >>> [(b.offset, b.size) for b in flat_range((3, 4), 2, 9)]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if not size:
        return [Box((), ())]
    row = math.prod(size[1:])
    first, last = start // row, (stop - 1) // row
    if start == first * row and stop == (last + 1) * row:  # whole rows
        return [Box((first, *(0 for _ in size[1:])), (last + 1 - first, *size[1:]))]
    if first == last:
        inner = flat_range(size[1:], start - first * row, stop - first * row)
        return [Box((first, *box.offset), (1, *box.size)) for box in inner]
    head = (first + 1) * row if start % row else start
    tail = last * row if stop % row else stop
    return [
        *flat_range(size, start, head),
        *flat_range(size, head, tail),
        *flat_range(size, tail, stop),
    ]
