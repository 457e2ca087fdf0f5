"""What ranks lack and who sends it to them: the inside of a resharding plan.

Parameters that are spread alike (the layers of a stage) make one kind and are worked out together.
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
from engine.parallel.boxes import Box, Index, tiles
from engine.parallel.shard_map import Held, Holdings

Ranks = NDArray[np.int32]


@dataclass(frozen=True)
class Move:
    """A box that some ranks lack, in all parameters of a kind."""

    box: Box
    holders: tuple[int, ...]  # ranks that could send it
    receivers: Ranks  # [n] ranks that lack it
    # Who sends it to each receiver: rows of [n]. Parameter i of the kind uses row i modulo their
    # number, so that holders take turns over alike parameters.
    senders: list[Ranks] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """Parameters with the same shape, dtype, holders and takers."""

    names: list[str]
    shape: Index
    dtype: torch.dtype  # in the target and on the wire
    source: tuple[Held, ...]
    target: tuple[Held, ...]
    moves: list[Move] = field(default_factory=list)


def by_rank(held: Iterable[Held]) -> dict[int, list[Held]]:
    """The same, rank by rank."""
    found: dict[int, list[Held]] = defaultdict(list)
    for one in held:
        for rank in one.ranks:
            found[rank].append(one)
    return dict(found)


def make_kinds(source: Holdings, target: Holdings) -> list[Kind]:
    """Sort the target's parameters into kinds, with the moves that each needs but no senders.

    Raises ModelError for what the source does not hold, and ConfigError for a target that wants
    an element of a parameter twice on one rank.
    """
    canon: dict[tuple[Held, ...], int] = {}
    seen: dict[int, int] = {}  # id of a tuple → number of its value; alike layers share tuples

    def number(held: tuple[Held, ...]) -> int:
        if id(held) not in seen:
            seen[id(held)] = canon.setdefault(held, len(canon))
        return seen[id(held)]

    kinds: dict[object, Kind] = {}
    for name, wanted in target.spreads.items():
        there = source.spreads.get(name)
        if there is None or there.shape != wanted.shape:
            what = f"holds {list(there.shape)}" if there else "has no such parameter"
            raise ModelError(
                f"rollout wants {name!r} {list(wanted.shape)}, but the trainer {what}; use the "
                "same model on both sides, and its names in the whole model"
            )
        dtype = target.dtypes[name]
        key = (number(there.held), number(wanted.held), wanted.shape, dtype)
        kind = kinds.setdefault(key, Kind([], wanted.shape, dtype, there.held, wanted.held))
        kind.names.append(name)
    for kind in kinds.values():
        kind.moves.extend(_lacking(kind))
    return list(kinds.values())


def _lacking(kind: Kind) -> Iterable[Move]:
    _check_places(kind)
    takers: dict[Box, set[int]] = defaultdict(set)
    for held in kind.target:
        takers[held.box].update(held.ranks)
    available = tiles((held.box, held.ranks) for held in kind.source)
    for wanted, ranks in takers.items():
        covered = 0
        for tile, holders in available:
            box = wanted.intersect(tile)
            if box is None:
                continue
            covered += box.elements
            receivers = sorted(ranks.difference(holders))
            if receivers:
                yield Move(box, holders, np.array(receivers, np.int32))
        if covered != wanted.elements:
            raise ModelError(
                f"no rank holds {wanted.elements - covered} of the {wanted.elements} elements of "
                f"{kind.names[0]!r} that rollout rank {min(ranks)} wants; the trainer's ranks must "
                "hold the whole model together"
            )


def _check_places(kind: Kind) -> None:
    for rank, held in by_rank(kind.target).items():
        for i, one in enumerate(held):
            if any(one.box.intersect(other.box) for other in held[:i]):
                raise ConfigError(
                    f"rank {rank} wants elements of {kind.names[0]!r} in two places; share one "
                    "storage between them"
                )


def choose_senders(kinds: Sequence[Kind], world_size: int, hosts: Sequence[str]) -> None:
    """Give every receiver a sender: one of its host if there is one, else the least loaded.

    What has few holders is given out first, and large boxes before small ones.
    """
    load = [0] * world_size  # bytes to send
    moves = [(kind, move) for kind in kinds for move in kind.moves]
    moves.sort(key=lambda m: (len(m[1].holders), -m[1].box.elements * m[0].dtype.itemsize))
    for kind, move in moves:
        size = move.box.elements * kind.dtype.itemsize
        turns = min(len(kind.names), len(move.holders))
        for turn in range(turns):
            alike = len(range(turn, len(kind.names), turns))
            move.senders.append(_serve(move, size * alike, load, hosts))


def _serve(move: Move, size: int, load: list[int], hosts: Sequence[str]) -> Ranks:
    """The sender of each receiver; adds `size` bytes for each to its sender's load."""
    near: dict[str, list[int]] = defaultdict(list)
    for rank in move.holders if hosts else ():
        near[hosts[rank]].append(rank)
    queues: dict[str, list[tuple[int, int]]] = {}
    senders = np.empty(len(move.receivers), np.int32)
    for i, receiver in enumerate(move.receivers.tolist()):
        host = hosts[receiver] if hosts and hosts[receiver] in near else ""
        if host not in queues:
            queues[host] = [(load[rank], rank) for rank in near.get(host, move.holders)]
            heapq.heapify(queues[host])
        before, sender = queues[host][0]
        heapq.heapreplace(queues[host], (before + size, sender))
        load[sender] += size
        senders[i] = sender
    return senders
