"""Layouts: how ranks are arranged in axes, and which models they fit. Pure values, no torch.

`Layout` is that of training; `RolloutLayout` that of generation by the same ranks. HybridFlow's
grouping (arXiv:2409.19256, section 5.2) makes a rank's training shard a part of its rollout shard,
so that a rank keeps what it has; `reshard` plans how the other shards are sent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from engine.config import ParallelConfig
from engine.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


AXES = ("pp", "dp", "fsdp", "sp", "tp")  # outermost first; the last one's neighbours are adjacent
DATA_AXES = ("dp", "fsdp")  # training ranks with rows of their own


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of an MoE model's layers."""

    count: int  # a layer's, e.g. 128
    chosen: int  # of them, for a token, e.g. 8
    width: int  # an expert's intermediate size, e.g. 768
    layers: int  # with experts, e.g. 48; others have the MLP of a dense model
    shared: int = 0  # intermediate size of the MLP beside them that every token takes

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self | None:
        """Read a transformers configuration; None for a model without experts."""
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        count = max(int(getattr(config, name, None) or 0) for name in names)
        if not count:
            return None
        layers = int(config.num_hidden_layers)
        step = int(getattr(config, "decoder_sparse_step", None) or 1)
        dense = {*(getattr(config, "mlp_only_layers", None) or ())}
        return cls(
            count,
            int(config.num_experts_per_tok),
            int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size),
            sum(n not in dense and (n + 1) % step == 0 for n in range(layers)),
            int(getattr(config, "shared_expert_intermediate_size", None) or 0),
        )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a causal language model that decide which layouts it fits."""

    layers: int  # e.g. 28
    heads: int  # e.g. 12
    kv_heads: int  # e.g. 2
    head_dim: int  # e.g. 128
    hidden: int  # e.g. 1536
    intermediate: int  # e.g. 8960
    vocab: int  # e.g. 151936
    tied: bool = False  # whether the head is the input embedding
    experts: Experts | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        """Read a transformers configuration (Llama, Mistral, Qwen2, Qwen3 and the like).

        Raises ConfigError for one that names these sizes otherwise.
        """
        try:
            heads = int(config.num_attention_heads)
            return cls(
                layers=int(config.num_hidden_layers),
                heads=heads,
                kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
                head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
                hidden=int(config.hidden_size),
                intermediate=int(config.intermediate_size),
                vocab=int(config.vocab_size),
                tied=bool(config.tie_word_embeddings),
                experts=Experts.of(config),
            )
        except AttributeError as error:
            raise ConfigError(
                f"a model of type {getattr(config, 'model_type', type(config).__name__)!r} can't "
                f"be sharded over ranks: its configuration has no {error.name}; use one rank"
            ) from error


@dataclass(frozen=True, slots=True)
class DataShard:
    """One rank's part of the rows of a call."""

    index: int
    count: int  # how many parts there are
    collects: bool  # this rank's result stands for all ranks that got the same rows


class RankGrid(ABC):
    """Ranks in a grid of named axes; as in torch's DeviceMesh, the last axis changes fastest."""

    __slots__ = ()

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Size of each axis, outermost first."""

    @property
    @abstractmethod
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which the rows of a batch are split."""

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` on each axis."""
        coordinates: dict[str, int] = {}
        for axis, size in reversed(self.sizes.items()):
            rank, coordinates[axis] = divmod(rank, size)
        return {axis: coordinates[axis] for axis in self.sizes}

    def data_shard(self, rank: int) -> DataShard:
        """Return the part of a batch's rows that `rank` gets.

        Of the ranks with the same part, the one whose other coordinates are 0 returns the result.
        """
        split, coordinates = self.data_axes, self.coordinates(rank)
        count = math.prod(self.sizes[axis] for axis in split)
        collects = not any(at for axis, at in coordinates.items() if axis not in split)
        return DataShard(self.index(coordinates, split), count, collects)

    def index(self, coordinates: Mapping[str, int], axes: Iterable[str]) -> int:
        """Return a rank's number among those that differ in `axes` only; the first counts most."""
        sizes, index = self.sizes, 0
        for axis in axes:
            index = index * sizes[axis] + coordinates[axis]
        return index

    def __str__(self) -> str:
        """The axes in use, e.g. "fsdp=2 tp=2"; "one rank" where there are none."""
        used = [f"{axis}={size}" for axis, size in self.sizes.items() if size > 1]
        return " ".join(used) or "one rank"


@dataclass(frozen=True, slots=True)
class Layout(RankGrid):
    """Sizes of the axes. Rank r's coordinates are its digits: `tp` changes fastest, `pp` slowest.

    >>> Layout(fsdp=2, tp=2).coordinates(3)
    {'pp': 0, 'dp': 0, 'fsdp': 1, 'sp': 0, 'tp': 1}
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    sp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, config: ParallelConfig) -> Self:
        """Return the layout that a configuration asks for."""
        return cls(**{axis: getattr(config, axis) for axis in AXES})

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def data_axes(self) -> tuple[str, ...]:
        return DATA_AXES

    @property
    def data_ranks(self) -> int:
        """How many groups of ranks get rows of their own."""
        return self.dp * self.fsdp

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the ranks that differ in `axes` only, group by group; a rank is in exactly one.

        >>> Layout(fsdp=2, tp=2).groups("tp")
        [[0, 1], [2, 3]]
        """
        by_coordinates: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self.coordinates(rank)
            key = tuple(coordinates[axis] for axis in AXES if axis not in axes)
            by_coordinates.setdefault(key, []).append(rank)
        return list(by_coordinates.values())


def check_layout(layout: Layout, world_size: int, shape: ModelShape | None = None) -> None:
    """Raise ConfigError for a layout that `world_size` ranks, or a model, can't take."""
    if layout.world_size != world_size:
        raise ConfigError(
            f"the layout {layout} is one of {layout.world_size} ranks, but there are {world_size}; "
            "make dp · fsdp · sp · tp · pp equal to the number of ranks"
        )
    if shape is None:
        return
    together = "sp" if layout.tp == 1 else "sp · tp"
    for axes, size, what, count in (
        ("tp", layout.tp, "num_attention_heads", shape.heads),
        ("tp", layout.tp, "intermediate_size", shape.intermediate),
        (together, layout.sp * layout.tp, "num_attention_heads", shape.heads),
    ):
        if count % size:
            raise ConfigError(
                f"{axes}={size} does not divide the model's {what}={count}; choose a divisor of "
                f"it: the next best is {_next_best(layout, shape)}"
            )
    if shape.kv_heads % layout.tp and layout.tp % shape.kv_heads:
        raise ConfigError(
            f"tp={layout.tp} neither divides the model's num_key_value_heads={shape.kv_heads} nor "
            "is a multiple of it; choose one that does"
        )
    if shape.layers < layout.pp:
        raise ConfigError(
            f"pp={layout.pp} stages are more than the model's {shape.layers} layers; lower pp"
        )


def _next_best(layout: Layout, shape: ModelShape) -> Layout:
    """Return the layout of as many ranks whose sp and tp divide the model's sizes; fsdp grows."""
    tp = math.gcd(layout.tp, shape.heads, shape.intermediate)
    if shape.kv_heads % tp and tp % shape.kv_heads:
        tp = math.gcd(tp, shape.kv_heads)
    sp = math.gcd(layout.sp, shape.heads // tp)
    fsdp = layout.fsdp * layout.sp * layout.tp // (sp * tp)
    return Layout(layout.pp, layout.dp, fsdp, sp, tp)


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
        return dict(self.axes)

    @property
    def data_axes(self) -> tuple[str, ...]:  # all others
        return tuple(name for name, _ in self.axes if name not in self.tp_axes + self.pp_axes)

    @property
    def tp(self) -> int:
        """Ranks that share each matrix in rollout, t_g."""
        return self._count(self.tp_axes)

    @property
    def pp(self) -> int:
        """Stages in rollout, p_g."""
        return self._count(self.pp_axes)

    def place(self, rank: int) -> Place:
        """Return the rollout coordinates of a training rank."""
        coordinates = self.coordinates(rank)
        parts = (self.pp_axes, self.tp_axes, self.data_axes)
        return Place(*(self.index(coordinates, axes) for axes in parts))

    def tp_groups(self) -> list[list[int]]:
        """Return the ranks that share matrices, each group in the order of the tp coordinate."""
        groups: dict[tuple[int, int], list[int]] = {}
        for place, rank in sorted((self.place(rank), rank) for rank in range(self.world_size)):
            groups.setdefault((place.data, place.pp), []).append(rank)
        return [groups[key] for key in sorted(groups)]

    def _count(self, names: tuple[str, ...]) -> int:
        return math.prod(size for name, size in self.axes if name in names)


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
    shards, tp_factor = layout.fsdp * layout.sp, max(1, tp // layout.tp)
    tp_of_shards = math.gcd(tp_factor, shards)
    tp_of_copies = tp_factor // tp_of_shards
    if max(layout.tp, tp) % min(layout.tp, tp) or layout.dp % tp_of_copies:
        raise ConfigError(
            f"a rollout with tp={tp} can't be made of the trainer's {layout}; choose a divisor of "
            f"its tp={layout.tp}, or that times a divisor of dp · fsdp · sp = {shards * layout.dp}"
        )
    axes = (
        ("pp", pp),
        ("micro_pp", layout.pp // pp),
        ("dp", layout.dp // tp_of_copies),
        ("tp_dp", tp_of_copies),
        ("tp_shard", tp_of_shards),
        ("shard", shards // tp_of_shards),
        ("tp", min(tp, layout.tp)),
        ("micro_tp", max(1, layout.tp // tp)),
    )
    return RolloutLayout(axes, tp_axes=("tp", "tp_shard", "tp_dp"))
