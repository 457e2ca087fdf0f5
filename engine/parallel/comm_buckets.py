"""A rank's plan cut into all-to-alls of bounded size. Pure values; `exchange` runs them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.errors import ConfigError
from engine.parallel.boxes import Index, flat_range
from engine.parallel.reshard import RankPlan, RemoteSlice


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """A box of a parameter's tensor, and where its elements lie in a bucket."""

    parameter: str
    start: Index
    size: Index
    offset: int  # in elements
    elements: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one all-to-all sends, or receives, by rank."""

    slices: list[BucketSlice]
    counts: list[int]  # elements from or to each rank

    @property
    def elements(self) -> int:
        """Elements in it."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class AllToAll:
    """A collective on elements of one dtype."""

    dtype: torch.dtype
    send: Bucket
    receive: Bucket


def make_all_to_alls(plan: RankPlan, bucket_bytes: int) -> Iterator[AllToAll]:
    """Cut what goes between each two ranks into as many equal parts as the busiest rank needs.

    All ranks know `max_traffic`, so every rank makes the same number of all-to-alls, and both ends
    of a pair know the sizes without sending them. Raises ConfigError for buckets too small for an
    element of each peer.
    """
    for dtype in sorted(plan.max_traffic, key=str):
        most, peers = plan.max_traffic[dtype]
        room = bucket_bytes // dtype.itemsize - peers  # a part may be one element above the mean
        if most and room < 1:
            raise ConfigError(
                f"buckets of {bucket_bytes} bytes are too small for {peers} peers; raise "
                "bucket_bytes"
            )
        count = math.ceil(most / room) if most else 0
        outgoing = _by_peer(s for s in plan.sends if plan.dtypes[s.parameter] == dtype)
        incoming = _by_peer(s for s in plan.receives if plan.dtypes[s.parameter] == dtype)
        for number in range(count):
            yield AllToAll(
                dtype,
                _bucket(outgoing, plan.world_size, number, count),
                _bucket(incoming, plan.world_size, number, count),
            )


@dataclass(frozen=True, slots=True)
class _PeerSlices:
    """All slices from or to one peer, end to end."""

    slices: Sequence[RemoteSlice]
    ends: Sequence[int]  # elements up to the end of each slice

    def cut(self, start: int, stop: int, offset: int) -> Iterator[BucketSlice]:
        """The boxes of elements `start` to `stop`, laid out from `offset` on."""
        number = bisect_right(self.ends, start)
        while start < stop:
            one, end = self.slices[number], self.ends[number]
            before = end - math.prod(one.size)
            until = min(stop, end)
            for box in flat_range(one.size, start - before, until - before):
                at = tuple(a + b for a, b in zip(one.start, box.offset, strict=True))
                yield BucketSlice(one.parameter, at, box.size, offset, box.elements)
                offset += box.elements
            start, number = until, number + 1


def _by_peer(slices: Iterable[RemoteSlice]) -> dict[int, _PeerSlices]:
    found: dict[int, list[RemoteSlice]] = defaultdict(list)
    for one in slices:
        found[one.peer].append(one)
    return {
        peer: _PeerSlices(some, list(accumulate(math.prod(one.size) for one in some)))
        for peer, some in found.items()
    }


def _bucket(by_peer: dict[int, _PeerSlices], world_size: int, number: int, count: int) -> Bucket:
    """Part `number` of `count` of each slices_of_peer."""
    slices: list[BucketSlice] = []
    counts, offset = [0] * world_size, 0
    for peer in sorted(by_peer):
        slices_of_peer = by_peer[peer]
        start, stop = (slices_of_peer.ends[-1] * n // count for n in (number, number + 1))
        slices.extend(slices_of_peer.cut(start, stop, offset))
        counts[peer] = stop - start
        offset += stop - start
    return Bucket(slices, counts)
