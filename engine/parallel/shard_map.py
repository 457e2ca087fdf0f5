"""Holdings: which rank has which box of each parameter, and where in its storage. Pure values.

Layouts become holdings in `spreads`, live models in `live`; `reshard` plans from one to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from engine.errors import ConfigError
from engine.parallel.boxes import Box, Index


@dataclass(frozen=True, slots=True)
class Held:
    """These ranks hold `box`; its first element is at index `start` of each one's storage."""

    box: Box
    start: Index  # e.g. (1536, 0): the keys' rows in a fused matrix begin below the queries'
    ranks: tuple[int, ...]  # e.g. (0, 4)


@dataclass(frozen=True)
class Spread:
    """One parameter over all ranks. A rank may be in several of `held`, or in none."""

    shape: Index  # of the whole parameter, e.g. (1536, 1536)
    storage: str  # name of the tensor that it lies in, on every rank
    held: tuple[Held, ...]


@dataclass(frozen=True)
class Holdings:
    """All parameters over all ranks, by the parameters' names in the whole model."""

    world_size: int
    spreads: Mapping[str, Spread]
    dtypes: Mapping[str, torch.dtype] = field(repr=False)  # of each parameter in its storage
    hosts: tuple[str, ...] = ()  # the machine of each rank, where it is known

    def __post_init__(self) -> None:
        last = max((r for s in self.spreads.values() for h in s.held for r in h.ranks), default=0)
        if last >= self.world_size:
            raise ConfigError(
                f"rank {last} holds parameters, but there are {self.world_size} ranks; give the "
                "world size of all ranks that take part"
            )

    @property
    def shapes(self) -> dict[str, Index]:
        """Whole parameters' shapes."""
        return {name: spread.shape for name, spread in self.spreads.items()}
