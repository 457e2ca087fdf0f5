"""How a role's ranks are arranged: named axes, and which share of a batch each rank gets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import PlacementError

# Axes over which `Dispatch.DATA_PARALLEL` splits rows: those of training, and those of rollout, in
# which ranks that train one copy of the model may decode with a copy each.
DATA_AXES = ("dp", "fsdp", "shard", "micro_pp", "micro_tp")


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part in a call that splits rows."""

    index: int  # which part of the rows, e.g. 1
    parts: int  # how many parts there are, e.g. 2
    collects: bool  # this rank's result stands for all ranks that got the same rows


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid of named axes; as in torch's DeviceMesh, the last axis changes fastest.

    >>> Mesh.of(dp=2, tp=2).coordinates(3)
    {'dp': 1, 'tp': 1}
    """

    axes: tuple[tuple[str, int], ...]  # name and size, e.g. (("dp", 2), ("tp", 2))

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) < len(names) or any(size < 1 for _, size in self.axes):
            raise PlacementError(f"mesh {dict(self.axes)}: give each axis once, with a size >= 1")

    @staticmethod
    def of(**sizes: int) -> Mesh:
        """Make a mesh of these axes, in this order."""
        return Mesh(tuple(sizes.items()))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` sits on each axis."""
        where: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, where[name] = divmod(rank, size)
        return {name: where[name] for name, _ in self.axes}

    def share(self, rank: int, axes: Iterable[str] = DATA_AXES) -> Share:
        """The part that `rank` gets when rows are split over `axes`.

        Ranks that differ in other axes only get the same part, and the one whose other
        coordinates are 0 gives the result. An axis that the mesh lacks counts as one of size 1.
        """
        split, where = set(axes), self.coordinates(rank)
        index, parts = 0, 1
        for name, size in self.axes:
            if name in split:
                index, parts = index * size + where[name], parts * size
        return Share(index, parts, not any(c for name, c in where.items() if name not in split))
