"""The resharding plan: which slices each rank keeps, sends and receives. A pure function.

Every destination element has one source: the rank itself where it holds it, else one of its
holders. So the bytes received are those that the rank lacks, and no plan can do with fewer.
`exchange` carries a plan out; the order of ranks that makes it cheap is in `grouping`
(HybridFlow, arXiv:2409.19256, section 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.parallel.boxes import Box, Index, minus_all
from engine.parallel.shard_map import Held, Holdings
from engine.parallel.transfer_plan import Kind, by_rank, choose_senders, make_kinds

Bytes = NDArray[np.int64]


class Slice(NamedTuple):
    """A box of a parameter in this rank's storage, on its way from or to another rank."""

    parameter: str
    start: Index  # where it begins: in the source's tensor if sent, in the target's if received
    size: Index
    peer: int  # the other rank


class Kept(NamedTuple):
    """A box of a parameter that this rank holds already."""

    parameter: str
    source: Index  # where it begins in the source's tensor
    target: Index  # where it begins in the target's tensor
    size: Index


@dataclass(frozen=True)
class RankPlan:
    """One rank's part. Two ranks list the slices between them in the same order."""

    rank: int
    world_size: int
    sends: tuple[Slice, ...]
    receives: tuple[Slice, ...]
    kept: tuple[Kept, ...]
    storages: dict[str, str]  # target tensor of each parameter that this rank takes
    dtypes: dict[str, torch.dtype]  # of each parameter in the target and on the wire
    busiest: dict[torch.dtype, tuple[int, int]]  # any rank's most elements one way, and most peers

    def target_shapes(self) -> dict[str, Index]:
        """Shapes of target tensors that just hold what this rank takes, by storage name."""
        ends: dict[str, Index] = {}
        taken = [(s.parameter, s.start, s.size) for s in self.receives]
        taken += [(k.parameter, k.target, k.size) for k in self.kept]
        for name, start, size in taken:
            end = tuple(a + n for a, n in zip(start, size, strict=True))
            before = ends.get(self.storages[name], end)
            ends[self.storages[name]] = tuple(map(max, before, end))
        return ends


@dataclass(frozen=True)
class Plan:
    """All ranks' parts. `for_rank` writes one out; the totals need none of them."""

    source: Holdings
    target: Holdings
    kinds: Sequence[Kind] = field(repr=False)
    traffic: dict[torch.dtype, NDArray[np.int64]] = field(repr=False)  # elements [from, to]

    @property
    def sent(self) -> Bytes:
        """Bytes that each rank sends, [W]."""
        return self._total(axis=1)

    @property
    def received(self) -> Bytes:
        """Bytes that each rank receives, [W]."""
        return self._total(axis=0)

    @property
    def lower_bound(self) -> Bytes:
        """Bytes that each rank must have and does not hold, [W]: from the holdings alone."""
        return self._wanted(lacking=True)

    @property
    def kept(self) -> Bytes:
        """Bytes that each rank must have and holds already, [W]."""
        return self._wanted() - self._wanted(lacking=True)

    @property
    def model_bytes(self) -> int:
        """Bytes of the whole model in the target's dtypes."""
        sizes = (k.dtype.itemsize * Box.whole(k.shape).elements * len(k.names) for k in self.kinds)
        return sum(sizes)

    def for_rank(self, rank: int) -> RankPlan:
        """Slices that `rank` sends, receives and keeps."""
        sends: list[Slice] = []
        receives: list[Slice] = []
        kept: list[Kept] = []
        storages: dict[str, str] = {}
        for kind in self.kinds:
            own = by_rank(kind.source).get(rank, [])
            wanted = by_rank(kind.target).get(rank, [])
            routes = list(_routes(kind, rank, own, wanted))
            overlaps = list(_overlaps(own, wanted))
            for turn, name in enumerate(kind.names):
                for start, size, peers, outgoing in routes:
                    slices = [Slice(name, start, size, peer) for peer in peers[turn % len(peers)]]
                    (sends if outgoing else receives).extend(slices)
                kept.extend(Kept(name, *overlap) for overlap in overlaps)
                if wanted:
                    storages[name] = self.target.spreads[name].storage
        return RankPlan(
            rank=rank,
            world_size=self.target.world_size,
            sends=tuple(sends),
            receives=tuple(receives),
            kept=tuple(kept),
            storages=storages,
            dtypes={name: self.target.dtypes[name] for kind in self.kinds for name in kind.names},
            busiest={dtype: _busiest(matrix) for dtype, matrix in self.traffic.items()},
        )

    def _total(self, axis: int) -> Bytes:
        total = np.zeros(self.target.world_size, np.int64)
        for dtype, matrix in self.traffic.items():
            total += dtype.itemsize * matrix.sum(axis=axis)
        return total

    def _wanted(self, lacking: bool = False) -> Bytes:
        total = np.zeros(self.target.world_size, np.int64)
        for kind in self.kinds:
            own = by_rank(kind.source) if lacking else {}
            size = kind.dtype.itemsize * len(kind.names)
            for held in kind.target:
                for rank in held.ranks:
                    parts = minus_all(held.box, (h.box for h in own.get(rank, ())))
                    total[rank] += size * sum(part.elements for part in parts)
        return total


def plan(source: Holdings, target: Holdings) -> Plan:
    """Plan how ranks that hold `source` come to hold `target` as well.

    Ranks of one of `source.hosts` send to each other first. Raises ModelError where the source
    lacks what the target wants, ConfigError where they are of different ranks.
    """
    if source.world_size != target.world_size:
        raise ConfigError(
            f"the trainer's holdings are of {source.world_size} ranks, rollout's of "
            f"{target.world_size}; number both within one group of ranks"
        )
    kinds = make_kinds(source, target)
    choose_senders(kinds, target.world_size, source.hosts)
    square = (target.world_size, target.world_size)
    traffic = {kind.dtype: np.zeros(square, np.int64) for kind in kinds}
    for kind in kinds:
        for move in kind.moves:
            for turn, senders in enumerate(move.senders):
                alike = len(range(turn, len(kind.names), len(move.senders)))
                np.add.at(traffic[kind.dtype], (senders, move.receivers), move.box.elements * alike)
    return Plan(source, target, kinds, traffic)


def _routes(
    kind: Kind, rank: int, own: list[Held], wanted: list[Held]
) -> Iterator[tuple[Index, Index, list[list[int]], bool]]:
    """Start and size of each box that `rank` sends or gets, its peers by turn, whether it sends."""
    for move in kind.moves:
        incoming = [row[move.receivers == rank].tolist() for row in move.senders]
        if any(incoming):
            yield _start(move.box, wanted), move.box.size, incoming, False
        outgoing = [move.receivers[row == rank].tolist() for row in move.senders]
        if any(outgoing):
            yield _start(move.box, own), move.box.size, outgoing, True


def _start(box: Box, among: list[Held]) -> Index:
    """Where `box` begins in the storage of the one that has all of it."""
    held = next(h for h in among if h.box.intersect(box) == box)
    return box.start_in(held.box, held.start)


def _overlaps(own: list[Held], wanted: list[Held]) -> Iterator[tuple[Index, Index, Index]]:
    """Starts in source and target, and size, of what is in both; each element once."""
    for want in wanted:
        left = [want.box]
        for have in own:
            for common in filter(None, (piece.intersect(have.box) for piece in left)):
                source = common.start_in(have.box, have.start)
                yield source, common.start_in(want.box, want.start), common.size
            left = [part for piece in left for part in piece.minus(have.box)]


def _busiest(matrix: NDArray[np.int64]) -> tuple[int, int]:
    """The most elements that a rank of a [from, to] matrix sends or gets, and the most peers."""
    used = matrix > 0
    most = max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max())
    peers = max(used.sum(axis=0).max(), used.sum(axis=1).max())
    return int(most), int(peers)
