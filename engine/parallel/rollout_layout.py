"""The rollout's layout of the training ranks. Pure values, no torch.

HybridFlow's grouping (arXiv:2409.19256, section 5.2) makes a rank's training shard a part of its
rollout shard, so that a rank keeps what it has. `reshard` plans how the other shards are sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import ConfigError
from engine.parallel.layout import Layout, RankGrid

# Of the grid of training ranks, row-major. The axes named tp and pp are the rollout's.
_TP_AXES = ("tp", "tp_shard", "tp_dp")  # the first counts most


class Place(NamedTuple):
    """A rank's coordinates in the rollout's layout."""

    pp: int
    tp: int
    data: int  # which copy of the model it is part of


@dataclass(frozen=True, slots=True)
class RolloutLayout(RankGrid):
    """Ranks as a grid of named axes, some of which together are the rollout's tp, some its pp.

    >>> rollout_layout(Layout(tp=4), tp=2).tp_groups()
    [[0, 2], [1, 3]]
    """

    axes: tuple[tuple[str, int], ...]  # the last changes fastest
    tp_axes: tuple[str, ...] = ("tp",)  # their digits make the tp coordinate, the first counts most
    pp_axes: tuple[str, ...] = ("pp",)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, outermost first."""
        return dict(self.axes)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which prompts are split: all others."""
        return tuple(name for name, _ in self.axes if name not in self.tp_axes + self.pp_axes)

    @property
    def tp(self) -> int:
        """Ranks that share each matrix in rollout, t_g."""
        return self._count(self.tp_axes)

    @property
    def pp(self) -> int:
        """Stages in rollout, p_g."""
        return self._count(self.pp_axes)

    @property
    def data(self) -> int:
        """Copies of the model in rollout."""
        return self._count(self.data_axes)

    def place(self, rank: int) -> Place:
        """Rollout coordinates of a training rank."""
        where = self.coordinates(rank)
        return Place(
            pp=self._number(where, self.pp_axes),
            tp=self._number(where, self.tp_axes),
            data=self._number(where, self.data_axes),
        )

    def tp_groups(self) -> list[list[int]]:
        """Ranks that share matrices, each group in the order of the tp coordinate."""
        return self._groups("data", "pp")

    def replicas(self) -> list[list[int]]:
        """Ranks of each copy of the model, by stage and then by tp coordinate."""
        return self._groups("data")

    def _groups(self, *fields: str) -> list[list[int]]:
        """Ranks with the same values of `fields`, each group by stage and then tp coordinate."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(range(self.world_size), key=self.place):
            place = self.place(rank)
            found.setdefault(tuple(getattr(place, name) for name in fields), []).append(rank)
        return [found[key] for key in sorted(found)]

    def _count(self, names: tuple[str, ...]) -> int:
        return math.prod(size for name, size in self.axes if name in names)

    def _number(self, where: dict[str, int], names: tuple[str, ...]) -> int:
        sizes, number = dict(self.axes), 0
        for name in names:
            number = number * sizes[name] + where[name]
        return number


def rollout_layout(layout: Layout, pp: int = 1, tp: int = 1) -> RolloutLayout:
    """HybridFlow's grouping of `layout`'s ranks for a rollout of `pp` stages and `tp` shares.

    With tp below the trainer's, neighbouring training shards merge: rank i of t takes the rollout's
    shard i // (t / t_g), and is in micro data-parallel copy i % (t / t_g). Stages merge likewise.
    With tp above it, the ranks that share weights (fsdp, sp) are cut into runs of neighbours, and
    copies (dp) come last. Raises ConfigError for sizes that do not nest.
    """
    if layout.pp % pp:
        raise ConfigError(
            f"a rollout of pp={pp} stages can't be made of the trainer's {layout.pp}; choose a "
            "divisor of the trainer's pp"
        )
    shards, more = layout.fsdp * layout.sp, max(1, tp // layout.tp)
    of_shards = math.gcd(more, shards)
    of_copies = more // of_shards
    if max(layout.tp, tp) % min(layout.tp, tp) or layout.dp % of_copies:
        raise ConfigError(
            f"a rollout with tp={tp} can't be made of the trainer's {layout}; choose a divisor of "
            f"its tp={layout.tp}, or that times a divisor of dp · fsdp · sp = {shards * layout.dp}"
        )
    axes = (
        ("pp", pp),
        ("micro_pp", layout.pp // pp),
        ("dp", layout.dp // of_copies),
        ("tp_dp", of_copies),
        ("tp_shard", of_shards),
        ("shard", shards // of_shards),
        ("tp", min(tp, layout.tp)),
        ("micro_tp", max(1, layout.tp // tp)),
    )
    return RolloutLayout(axes, tp_axes=_TP_AXES)
