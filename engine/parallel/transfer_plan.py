"""What ranks lack and who sends it to them: the parts of a resharding plan.

Parameters that are sharded alike (the layers of a stage) are one group, planned together.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import ConfigError, ModelError
from engine.parallel.boxes import Box, Index, disjoint_boxes
from engine.parallel.shard_map import Shard, ShardMap

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
    """Each rank's shards."""
    found: dict[int, list[Shard]] = defaultdict(list)
    for one in shards:
        for rank in one.ranks:
            found[rank].append(one)
    return dict(found)


def make_transfer_groups(source: ShardMap, target: ShardMap) -> list[TransferGroup]:
    """Sort the target's parameters into groups, with the transfers that each needs but no senders.

    Raises ModelError for what the source does not hold, and ConfigError for a target that wants
    an element of a parameter twice on one rank.
    """
    numbers: dict[tuple[Shard, ...], int] = {}
    seen: dict[int, int] = {}  # id of a tuple → number of its value; alike layers share tuples

    def number(shards: tuple[Shard, ...]) -> int:
        if id(shards) not in seen:
            seen[id(shards)] = numbers.setdefault(shards, len(numbers))
        return seen[id(shards)]

    groups: dict[object, TransferGroup] = {}
    for name, wanted in target.parameters.items():
        there = source.parameters.get(name)
        if there is None or there.shape != wanted.shape:
            what = f"holds {list(there.shape)}" if there else "has no such parameter"
            raise ModelError(
                f"rollout wants {name!r} {list(wanted.shape)}, but the trainer {what}; use the "
                "same model on both sides, and its names in the whole model"
            )
        dtype = target.dtypes[name]
        key = (number(there.shards), number(wanted.shards), wanted.shape, dtype)
        group = groups.setdefault(
            key, TransferGroup([], wanted.shape, dtype, there.shards, wanted.shards)
        )
        group.names.append(name)
    for group in groups.values():
        group.transfers.extend(_find_transfers(group))
    return list(groups.values())


def _find_transfers(group: TransferGroup) -> Iterable[Transfer]:
    """What ranks lack of a group's target, in boxes with the same holders."""
    _check_disjoint(group)
    receivers_of: dict[Box, set[int]] = defaultdict(set)
    for shard in group.target:
        receivers_of[shard.box].update(shard.ranks)
    available = disjoint_boxes((shard.box, shard.ranks) for shard in group.source)
    for wanted, ranks in receivers_of.items():
        covered = 0
        for tile, holders in available:
            box = wanted.intersect(tile)
            if box is None:
                continue
            covered += box.elements
            receivers = sorted(ranks.difference(holders))
            if receivers:
                yield Transfer(box, holders, np.array(receivers, np.int32))
        if covered != wanted.elements:
            raise ModelError(
                f"no rank holds {wanted.elements - covered} of the {wanted.elements} elements of "
                f"{group.names[0]!r} that rollout rank {min(ranks)} wants; the trainer's ranks "
                "must hold the whole model together"
            )


def _check_disjoint(group: TransferGroup) -> None:
    """Raise ConfigError for a target that wants an element twice on one rank."""
    for rank, shards in shards_by_rank(group.target).items():
        for i, one in enumerate(shards):
            if any(one.box.intersect(other.box) for other in shards[:i]):
                raise ConfigError(
                    f"rank {rank} wants elements of {group.names[0]!r} in two places; share one "
                    "storage between them"
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
            transfer.senders.append(_assign_senders(transfer, size * alike, load, hosts))


def _assign_senders(
    transfer: Transfer, size: int, load: list[int], hosts: Sequence[str]
) -> RankArray:
    """The sender of each receiver; adds `size` bytes for each to its sender's load."""
    near: dict[str, list[int]] = defaultdict(list)
    for rank in transfer.holders if hosts else ():
        near[hosts[rank]].append(rank)
    queues: dict[str, list[tuple[int, int]]] = {}
    senders = np.empty(len(transfer.receivers), np.int32)
    for i, receiver in enumerate(transfer.receivers.tolist()):
        host = hosts[receiver] if hosts and hosts[receiver] in near else ""
        if host not in queues:
            queues[host] = [(load[rank], rank) for rank in near.get(host, transfer.holders)]
            heapq.heapify(queues[host])
        before, sender = queues[host][0]
        heapq.heapreplace(queues[host], (before + size, sender))
        load[sender] += size
        senders[i] = sender
    return senders
