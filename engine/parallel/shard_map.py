"""Shard maps: which rank has which box of each parameter, and where in its storage. Pure values.

`sharding_specs` makes one of a layout, `module_shards` of a module; `reshard` plans from one to
another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from engine.errors import ConfigError
from engine.parallel.boxes import Box, Index


@dataclass(frozen=True, slots=True)
class Shard:
    """A box that these ranks store; its first element is at index `start` of each one's tensor."""

    box: Box
    start: Index  # e.g. (1536, 0): the keys' rows in a fused matrix begin below the queries'
    ranks: tuple[int, ...]  # e.g. (0, 4)


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter over all ranks. A rank may have several of `shards`, or none."""

    shape: Index  # of the whole parameter, e.g. (1536, 1536)
    storage: str  # name of the tensor that it lies in, on every rank
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class ShardMap:
    """All parameters over all ranks, by the parameters' names in the whole model."""

    world_size: int
    parameters: Mapping[str, ShardedParameter]
    dtypes: Mapping[str, torch.dtype] = field(repr=False)  # of each parameter in its storage
    hosts: tuple[str, ...] = ()  # the machine of each rank, where it is known

    def __post_init__(self) -> None:
        shards = (shard for one in self.parameters.values() for shard in one.shards)
        last = max((rank for shard in shards for rank in shard.ranks), default=0)
        if last >= self.world_size:
            raise ConfigError(
                f"rank {last} holds parameters, but there are {self.world_size} ranks; give the "
                "world size of all ranks that take part"
            )

    @property
    def shapes(self) -> dict[str, Index]:
        """Whole parameters' shapes."""
        return {name: parameter.shape for name, parameter in self.parameters.items()}
