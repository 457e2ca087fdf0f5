"""The resharding plan: which slices each rank copies, sends and receives. Pure functions.

Every destination element has one source: the rank itself where it holds it, else one of its
holders. So the bytes received are those that the rank lacks, and no plan can do with fewer.
Parameters that are sharded alike are planned together, and a rank's plan is cut into all-to-alls of
bounded size, which `exchange` runs.
"""

import heapq
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import ConfigError, ModelError
from engine.parallel import shard_maps
from engine.parallel.shard_maps import Box, Index, Shard, ShardMap

RankArray = NDArray[np.int32]


@dataclass(frozen=True)
class Transfer:
    """A box that some ranks lack, in all parameters of a group."""

    box: Box
    holders: tuple[int, ...]  # ranks that could send it
    receivers: RankArray  # [n] ranks that lack it
    # Who sends it to each receiver: rows of [n]. Parameter i of the group uses row i modulo their
    # number, so that holders take turns over alike parameters.
    senders: list[RankArray] = field(default_factory=list)


@dataclass(frozen=True)
class TransferGroup:
    """Parameters with the same shape, dtype, source shards and target shards."""

    names: list[str]
    shape: Index
    dtype: torch.dtype  # in the target and on the wire
    source: tuple[Shard, ...]
    target: tuple[Shard, ...]
    transfers: list[Transfer] = field(default_factory=list)


def shards_by_rank(shards: Iterable[Shard]) -> dict[int, list[Shard]]:
    """Sort shards by the ranks that store them."""
    by_rank: dict[int, list[Shard]] = defaultdict(list)
    for shard in shards:
        for rank in shard.ranks:
            by_rank[rank].append(shard)
    return dict(by_rank)


def make_transfer_groups(source: ShardMap, target: ShardMap) -> list[TransferGroup]:
    """Sort the target's parameters into groups, with the transfers that each needs but no senders.

    Raises ModelError for what the source lacks, ConfigError for an element twice on one rank.
    """
    numbers: dict[tuple[Shard, ...], int] = {}
    seen: dict[int, int] = {}  # id of a tuple → number of its value; alike layers share tuples

    def number(shards: tuple[Shard, ...]) -> int:
        if id(shards) not in seen:
            seen[id(shards)] = numbers.setdefault(shards, len(numbers))
        return seen[id(shards)]

    groups: dict[object, TransferGroup] = {}
    for name, parameter in target.parameters.items():
        held = source.parameters.get(name)
        if held is None or held.shape != parameter.shape:
            problem = f"holds {list(held.shape)}" if held else "has no such parameter"
            raise ModelError(
                f"rollout wants {name!r} {list(parameter.shape)}, but the trainer {problem}; use "
                "the same model on both sides, and its names in the whole model"
            )
        dtype = target.dtypes[name]
        key = (number(held.shards), number(parameter.shards), parameter.shape, dtype)
        group = groups.setdefault(
            key, TransferGroup([], parameter.shape, dtype, held.shards, parameter.shards)
        )
        group.names.append(name)
    for group in groups.values():
        group.transfers.extend(_find_transfers(group))
    return list(groups.values())


def _find_transfers(group: TransferGroup) -> Iterable[Transfer]:
    """Find what ranks lack of a group's target, in boxes with the same holders."""
    for rank, shards in shards_by_rank(group.target).items():
        if any(a.box.intersect(b.box) for a, b in combinations(shards, 2)):
            raise ConfigError(
                f"rank {rank} wants elements of {group.names[0]!r} in two places; share one "
                "storage between them"
            )
    receivers_by_box: dict[Box, set[int]] = defaultdict(set)
    for shard in group.target:
        receivers_by_box[shard.box].update(shard.ranks)
    available = shard_maps.disjoint_boxes((shard.box, shard.ranks) for shard in group.source)
    for target_box, ranks in receivers_by_box.items():
        covered = 0
        for tile, holders in available:
            box = target_box.intersect(tile)
            if box is None:
                continue
            covered += box.elements
            receivers = sorted(ranks.difference(holders))
            if receivers:
                yield Transfer(box, holders, np.array(receivers, np.int32))
        if covered != target_box.elements:
            raise ModelError(
                f"no rank holds {target_box.elements - covered} of the {target_box.elements} "
                f"elements of {group.names[0]!r} that rollout rank {min(ranks)} wants; the "
                "trainer's ranks must hold the whole model together"
            )


def choose_senders(groups: Sequence[TransferGroup], world_size: int, hosts: Sequence[str]) -> None:
    """Give every receiver a sender: one of its host if there is one, else the least loaded.

    Boxes with few holders come first, and large ones before small ones.
    """
    load = [0] * world_size  # bytes to send
    transfers = [(group, transfer) for group in groups for transfer in group.transfers]
    transfers.sort(key=lambda t: (len(t[1].holders), -t[1].box.elements * t[0].dtype.itemsize))
    for group, transfer in transfers:
        size = transfer.box.elements * group.dtype.itemsize
        turns = min(len(group.names), len(transfer.holders))
        for turn in range(turns):
            alike = len(range(turn, len(group.names), turns))
            transfer.senders.append(_assign(transfer, size * alike, load, hosts))


def _assign(transfer: Transfer, size: int, load: list[int], hosts: Sequence[str]) -> RankArray:
    """Return the sender of each receiver; adds `size` bytes for each to its sender's load."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank in transfer.holders if hosts else ():
        by_host[hosts[rank]].append(rank)
    queues: dict[str, list[tuple[int, int]]] = {}
    senders = np.empty(len(transfer.receivers), np.int32)
    for i, receiver in enumerate(transfer.receivers.tolist()):
        host = hosts[receiver] if hosts and hosts[receiver] in by_host else ""
        if host not in queues:
            queues[host] = [(load[rank], rank) for rank in by_host.get(host, transfer.holders)]
            heapq.heapify(queues[host])
        bytes_sent, sender = queues[host][0]
        heapq.heapreplace(queues[host], (bytes_sent + size, sender))
        load[sender] += size
        senders[i] = sender
    return senders


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

    def source_boxes(self) -> Iterator[tuple[str, Index, Index]]:
        """Yield parameter, start and size of what is read of the source's tensors."""
        yield from (piece[:3] for piece in self.sends)
        yield from ((copy.parameter, copy.source, copy.size) for copy in self.local_copies)

    def target_boxes(self) -> Iterator[tuple[str, Index, Index]]:
        """Yield parameter, start and size of what is written to the target's tensors."""
        yield from (piece[:3] for piece in self.receives)
        yield from ((copy.parameter, copy.target, copy.size) for copy in self.local_copies)

    def target_shapes(self) -> dict[str, Index]:
        """Return the smallest target shapes for what this rank wants, by storage name."""
        ends: dict[str, Index] = {}
        for name, start, size in self.target_boxes():
            end = tuple(a + n for a, n in zip(start, size, strict=True))
            known_end = ends.get(self.storages[name], end)
            ends[self.storages[name]] = tuple(map(max, known_end, end))
        return ends


@dataclass(frozen=True)
class ReshardPlan:
    """The parts of all ranks; `for_rank` writes one out."""

    source: ShardMap
    target: ShardMap
    groups: Sequence[TransferGroup] = field(repr=False)
    traffic: dict[torch.dtype, NDArray[np.int64]] = field(repr=False)  # elements [from, to]

    def for_rank(self, rank: int) -> RankPlan:
        """Return the slices that `rank` sends, receives and copies."""
        sends: list[RemoteSlice] = []
        receives: list[RemoteSlice] = []
        local_copies: list[LocalCopy] = []
        storages: dict[str, str] = {}
        for group in self.groups:
            sources = shards_by_rank(group.source).get(rank, [])
            targets = shards_by_rank(group.target).get(rank, [])
            routes = list(_routes(group, rank, sources, targets))
            overlaps = list(_overlaps(sources, targets))
            for turn, name in enumerate(group.names):
                for start, size, peers, outgoing in routes:
                    slices = [
                        RemoteSlice(name, start, size, peer) for peer in peers[turn % len(peers)]
                    ]
                    (sends if outgoing else receives).extend(slices)
                local_copies.extend(LocalCopy(name, *overlap) for overlap in overlaps)
                if targets:
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
    group: TransferGroup, rank: int, sources: list[Shard], targets: list[Shard]
) -> Iterator[tuple[Index, Index, list[list[int]], bool]]:
    """Start and size of each box that `rank` sends or gets, its peers by turn, whether it sends."""
    for transfer in group.transfers:
        incoming = [row[transfer.receivers == rank].tolist() for row in transfer.senders]
        if any(incoming):
            yield _start(transfer.box, targets), transfer.box.size, incoming, False
        outgoing = [transfer.receivers[row == rank].tolist() for row in transfer.senders]
        if any(outgoing):
            yield _start(transfer.box, sources), transfer.box.size, outgoing, True


def _start(box: Box, shards: list[Shard]) -> Index:
    """Find where `box` begins in the storage of the shard that has all of it."""
    shard = next(shard for shard in shards if shard.box.intersect(box) == box)
    return box.start_in(shard.box, shard.start)


def _overlaps(sources: list[Shard], targets: list[Shard]) -> Iterator[tuple[Index, Index, Index]]:
    """Yield starts in source and target, and size, of what is in both; each element once."""
    for target in targets:
        missing = [target.box]
        for held in sources:
            for common in filter(None, (part.intersect(held.box) for part in missing)):
                source = common.start_in(held.box, held.start)
                yield source, common.start_in(target.box, target.start), common.size
            missing = [piece for part in missing for piece in part.subtract(held.box)]


def _max_traffic(matrix: NDArray[np.int64]) -> tuple[int, int]:
    """Return the maxima over ranks of a [from, to] matrix: elements sent or got, and peers."""
    used = matrix > 0
    elements = max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max())
    peers = max(used.sum(axis=0).max(), used.sum(axis=1).max())
    return int(elements), int(peers)


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
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class AllToAll:
    """A collective on elements of one dtype."""

    dtype: torch.dtype
    send: Bucket
    receive: Bucket


def make_all_to_alls(plan: RankPlan, bucket_bytes: int) -> Iterator[AllToAll]:
    """Cut what goes between each two ranks into as many equal parts as the busiest rank needs.

    All ranks know `max_traffic`, so all make the same number of all-to-alls, and both ends of a
    pair know the sizes. Raises ConfigError for buckets too small for an element of each peer.
    """
    for dtype in sorted(plan.max_traffic, key=str):
        elements, peers = plan.max_traffic[dtype]
        room = bucket_bytes // dtype.itemsize - peers  # a part may be one element above the mean
        if elements and room < 1:
            raise ConfigError(
                f"buckets of {bucket_bytes} bytes are too small for {peers} peers; raise "
                "bucket_bytes"
            )
        count = math.ceil(elements / room) if elements else 0
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
    """The slices from or to one peer, end to end."""

    slices: Sequence[RemoteSlice]
    ends: Sequence[int]  # elements up to the end of each slice

    def cut(self, start: int, stop: int, offset: int) -> Iterator[BucketSlice]:
        """Yield the boxes of elements `start` to `stop`, laid out from `offset` on."""
        number = bisect_right(self.ends, start)
        while start < stop:
            piece, end = self.slices[number], self.ends[number]
            before = end - math.prod(piece.size)  # elements of earlier slices
            slice_stop = min(stop, end)
            for box in shard_maps.flat_range(piece.size, start - before, slice_stop - before):
                at = tuple(a + b for a, b in zip(piece.start, box.offset, strict=True))
                yield BucketSlice(piece.parameter, at, box.size, offset, box.elements)
                offset += box.elements
            start, number = slice_stop, number + 1


def _by_peer(slices: Iterable[RemoteSlice]) -> dict[int, _PeerSlices]:
    by_peer: dict[int, list[RemoteSlice]] = defaultdict(list)
    for piece in slices:
        by_peer[piece.peer].append(piece)
    return {
        peer: _PeerSlices(pieces, list(accumulate(math.prod(piece.size) for piece in pieces)))
        for peer, pieces in by_peer.items()
    }


def _bucket(by_peer: dict[int, _PeerSlices], world_size: int, number: int, count: int) -> Bucket:
    """Take part `number` of `count` of the slices of each peer."""
    slices: list[BucketSlice] = []
    counts, offset = [0] * world_size, 0
    for peer in sorted(by_peer):
        slices_of_peer = by_peer[peer]
        start, stop = (slices_of_peer.ends[-1] * n // count for n in (number, number + 1))
        slices.extend(slices_of_peer.cut(start, stop, offset))
        counts[peer] = stop - start
        offset += stop - start
    return Bucket(slices, counts)
