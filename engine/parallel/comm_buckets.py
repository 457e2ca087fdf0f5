"""Rounds: a rank's plan cut into all-to-alls of bounded size. Pure values; `exchange` runs them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.errors import ConfigError
from engine.parallel.boxes import Index, flat_run
from engine.parallel.reshard import RankPlan, Slice


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a parameter's tensor, and where its elements lie in a bucket."""

    parameter: str
    start: Index
    size: Index
    offset: int  # in elements
    elements: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What goes one way in a round, by rank."""

    pieces: list[Piece]
    counts: list[int]  # elements from or to each rank

    @property
    def elements(self) -> int:
        """Elements in it."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Round:
    """One all-to-all, of elements of one dtype."""

    dtype: torch.dtype
    send: Bucket
    receive: Bucket


def make_rounds(plan: RankPlan, bucket_bytes: int) -> Iterator[Round]:
    """Cut what goes between each two ranks into as many equal parts as the busiest rank needs.

    Both ends of a pair know how much that is, and all ranks know the busiest: so every rank makes
    the same number of rounds, and no sizes need be sent. Raises ConfigError for buckets without
    room for an element of each peer.
    """
    for dtype in sorted(plan.busiest, key=str):
        most, peers = plan.busiest[dtype]
        room = bucket_bytes // dtype.itemsize - peers  # a part may be one element above the mean
        if most and room < 1:
            raise ConfigError(
                f"buckets of {bucket_bytes} bytes are too small for {peers} peers; raise "
                "bucket_bytes"
            )
        count = math.ceil(most / room) if most else 0
        outgoing = _streams(s for s in plan.sends if plan.dtypes[s.parameter] == dtype)
        incoming = _streams(s for s in plan.receives if plan.dtypes[s.parameter] == dtype)
        for number in range(count):
            yield Round(
                dtype,
                _bucket(outgoing, plan.world_size, number, count),
                _bucket(incoming, plan.world_size, number, count),
            )


@dataclass(frozen=True, slots=True)
class _Stream:
    """All slices that go between two ranks one way, end to end."""

    slices: Sequence[Slice]
    ends: Sequence[int]  # elements up to the end of each slice

    def cut(self, start: int, stop: int, offset: int) -> Iterator[Piece]:
        """The boxes of elements `start` to `stop`, laid out from `offset` on."""
        number = bisect_right(self.ends, start)
        while start < stop:
            one, end = self.slices[number], self.ends[number]
            before = end - math.prod(one.size)
            until = min(stop, end)
            for box in flat_run(one.size, start - before, until - before):
                at = tuple(a + b for a, b in zip(one.start, box.offset, strict=True))
                yield Piece(one.parameter, at, box.size, offset, box.elements)
                offset += box.elements
            start, number = until, number + 1


def _streams(slices: Iterable[Slice]) -> dict[int, _Stream]:
    by_peer: dict[int, list[Slice]] = defaultdict(list)
    for one in slices:
        by_peer[one.peer].append(one)
    return {
        peer: _Stream(some, list(accumulate(math.prod(one.size) for one in some)))
        for peer, some in by_peer.items()
    }


def _bucket(streams: dict[int, _Stream], world_size: int, number: int, count: int) -> Bucket:
    """Part `number` of `count` of each stream."""
    pieces: list[Piece] = []
    counts, offset = [0] * world_size, 0
    for peer in sorted(streams):
        stream = streams[peer]
        start, stop = (stream.ends[-1] * n // count for n in (number, number + 1))
        pieces.extend(stream.cut(start, stop, offset))
        counts[peer] = stop - start
        offset += stop - start
    return Bucket(pieces, counts)
