"""The resharding plan: which slices each rank copies, sends and receives. A pure function.

Every destination element has one source: the rank itself where it holds it, else one of its
holders. So the bytes received are those that the rank lacks, and no plan can do with fewer.
`exchange` runs a plan; the order of ranks that makes it cheap is in `rollout_layout` (HybridFlow,
arXiv:2409.19256, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.parallel.boxes import Box, Index, subtract_all
from engine.parallel.shard_map import Shard, ShardMap
from engine.parallel.transfer_plan import (
    TransferGroup,
    choose_senders,
    make_transfer_groups,
    shards_by_rank,
)

ByteCounts = NDArray[np.int64]


class RemoteSlice(NamedTuple):
    """A box of a parameter that this rank sends to, or receives from, another."""

    parameter: str
    start: Index  # where it begins: in the source's tensor if sent, in the target's if received
    size: Index
    peer: int  # the other rank


class LocalCopy(NamedTuple):
    """A box of a parameter that this rank has already."""

    parameter: str
    source: Index  # where it begins in the source's tensor
    target: Index  # where it begins in the target's tensor
    size: Index


@dataclass(frozen=True)
class RankPlan:
    """One rank's part. Two ranks list the slices between them in the same order."""

    rank: int
    world_size: int
    sends: tuple[RemoteSlice, ...]
    receives: tuple[RemoteSlice, ...]
    local_copies: tuple[LocalCopy, ...]
    storages: dict[str, str]  # target tensor of each parameter that this rank wants
    dtypes: dict[str, torch.dtype]  # of each parameter in the target and on the wire
    # By dtype: the most elements that any rank sends or receives, and the most peers.
    max_traffic: dict[torch.dtype, tuple[int, int]]

    def target_shapes(self) -> dict[str, Index]:
        """Shapes of target tensors just large enough for what this rank wants, by storage name."""
        ends: dict[str, Index] = {}
        taken = [(s.parameter, s.start, s.size) for s in self.receives]
        taken += [(k.parameter, k.target, k.size) for k in self.local_copies]
        for name, start, size in taken:
            end = tuple(a + n for a, n in zip(start, size, strict=True))
            before = ends.get(self.storages[name], end)
            ends[self.storages[name]] = tuple(map(max, before, end))
        return ends


@dataclass(frozen=True)
class ReshardPlan:
    """All ranks' parts. `for_rank` writes one out; the totals need none of them."""

    source: ShardMap
    target: ShardMap
    groups: Sequence[TransferGroup] = field(repr=False)
    traffic: dict[torch.dtype, NDArray[np.int64]] = field(repr=False)  # elements [from, to]

    @property
    def sent(self) -> ByteCounts:
        """Bytes that each rank sends, [W]."""
        return self._total(axis=1)

    @property
    def received(self) -> ByteCounts:
        """Bytes that each rank receives, [W]."""
        return self._total(axis=0)

    @property
    def lower_bound(self) -> ByteCounts:
        """Bytes that each rank wants and lacks, [W]: from the shard maps alone."""
        return self._wanted(lacking=True)

    @property
    def kept(self) -> ByteCounts:
        """Bytes that each rank wants and has already, [W]."""
        return self._wanted() - self._wanted(lacking=True)

    @property
    def model_bytes(self) -> int:
        """Bytes of the whole model in the target's dtypes."""
        return sum(g.dtype.itemsize * math.prod(g.shape) * len(g.names) for g in self.groups)

    def for_rank(self, rank: int) -> RankPlan:
        """Slices that `rank` sends, receives and copies."""
        sends: list[RemoteSlice] = []
        receives: list[RemoteSlice] = []
        local_copies: list[LocalCopy] = []
        storages: dict[str, str] = {}
        for group in self.groups:
            own = shards_by_rank(group.source).get(rank, [])
            wanted = shards_by_rank(group.target).get(rank, [])
            routes = list(_routes(group, rank, own, wanted))
            overlaps = list(_overlaps(own, wanted))
            for turn, name in enumerate(group.names):
                for start, size, peers, outgoing in routes:
                    slices = [
                        RemoteSlice(name, start, size, peer) for peer in peers[turn % len(peers)]
                    ]
                    (sends if outgoing else receives).extend(slices)
                local_copies.extend(LocalCopy(name, *overlap) for overlap in overlaps)
                if wanted:
                    storages[name] = self.target.parameters[name].storage
        return RankPlan(
            rank=rank,
            world_size=self.target.world_size,
            sends=tuple(sends),
            receives=tuple(receives),
            local_copies=tuple(local_copies),
            storages=storages,
            dtypes={
                name: self.target.dtypes[name] for group in self.groups for name in group.names
            },
            max_traffic={dtype: _max_traffic(matrix) for dtype, matrix in self.traffic.items()},
        )

    def _total(self, axis: int) -> ByteCounts:
        total = np.zeros(self.target.world_size, np.int64)
        for dtype, matrix in self.traffic.items():
            total += dtype.itemsize * matrix.sum(axis=axis)
        return total

    def _wanted(self, lacking: bool = False) -> ByteCounts:
        total = np.zeros(self.target.world_size, np.int64)
        for group in self.groups:
            own = shards_by_rank(group.source) if lacking else {}
            size = group.dtype.itemsize * len(group.names)
            for shard in group.target:
                for rank in shard.ranks:
                    parts = subtract_all(shard.box, (one.box for one in own.get(rank, ())))
                    total[rank] += size * sum(part.elements for part in parts)
        return total


def plan_reshard(source: ShardMap, target: ShardMap) -> ReshardPlan:
    """Plan how ranks with the shards of `source` get those of `target`.

    Ranks of one of `source.hosts` send to each other first. Raises ModelError where the source
    lacks what the target wants, ConfigError where they are of different ranks.
    """
    if source.world_size != target.world_size:
        raise ConfigError(
            f"the trainer's shard map is of {source.world_size} ranks, rollout's of "
            f"{target.world_size}; number both within one group of ranks"
        )
    groups = make_transfer_groups(source, target)
    choose_senders(groups, target.world_size, source.hosts)
    square = (target.world_size, target.world_size)
    traffic = {group.dtype: np.zeros(square, np.int64) for group in groups}
    for group in groups:
        for transfer in group.transfers:
            for turn, senders in enumerate(transfer.senders):
                alike = len(range(turn, len(group.names), len(transfer.senders)))
                pairs = (senders, transfer.receivers)
                np.add.at(traffic[group.dtype], pairs, transfer.box.elements * alike)
    return ReshardPlan(source, target, groups, traffic)


def _routes(
    group: TransferGroup, rank: int, own: list[Shard], wanted: list[Shard]
) -> Iterator[tuple[Index, Index, list[list[int]], bool]]:
    """Start and size of each box that `rank` sends or gets, its peers by turn, whether it sends."""
    for transfer in group.transfers:
        incoming = [row[transfer.receivers == rank].tolist() for row in transfer.senders]
        if any(incoming):
            yield _start(transfer.box, wanted), transfer.box.size, incoming, False
        outgoing = [transfer.receivers[row == rank].tolist() for row in transfer.senders]
        if any(outgoing):
            yield _start(transfer.box, own), transfer.box.size, outgoing, True


def _start(box: Box, among: list[Shard]) -> Index:
    """Where `box` begins in the storage of the shard that has all of it."""
    shard = next(one for one in among if one.box.intersect(box) == box)
    return box.start_in(shard.box, shard.start)


def _overlaps(own: list[Shard], wanted: list[Shard]) -> Iterator[tuple[Index, Index, Index]]:
    """Starts in source and target, and size, of what is in both; each element once."""
    for want in wanted:
        left = [want.box]
        for have in own:
            for common in filter(None, (part.intersect(have.box) for part in left)):
                source = common.start_in(have.box, have.start)
                yield source, common.start_in(want.box, want.start), common.size
            left = [rest for part in left for rest in part.subtract(have.box)]


def _max_traffic(matrix: NDArray[np.int64]) -> tuple[int, int]:
    """The most elements that a rank of a [from, to] matrix sends or gets, and the most peers."""
    used = matrix > 0
    most = max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max())
    peers = max(used.sum(axis=0).max(), used.sum(axis=1).max())
    return int(most), int(peers)
