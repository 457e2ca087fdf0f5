"""Layouts: how ranks are arranged in axes, and which models they fit. Pure values, no torch.

`Layout` is that of training, `rollout_layout.RolloutLayout` that of generation by the same ranks.
The other files of this room apply a layout to a model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from engine.config import ParallelConfig
from engine.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

AXES = ("pp", "dp", "fsdp", "sp", "tp")  # outermost first; the last one's neighbours are adjacent
DATA_AXES = ("dp", "fsdp")  # training ranks with rows of their own


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a mixture's layers."""

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

    index: int  # e.g. 1
    count: int  # how many parts there are, e.g. 2
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
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of `rank` on each axis."""
        where: dict[str, int] = {}
        for axis, size in reversed(self.sizes.items()):
            rank, where[axis] = divmod(rank, size)
        return {axis: where[axis] for axis in self.sizes}

    def data_shard(self, rank: int) -> DataShard:
        """The part of a batch's rows that `rank` gets.

        Ranks that differ in other axes than `data_axes` get the same part, and the one whose other
        coordinates are 0 returns the result.
        """
        split, where = self.data_axes, self.coordinates(rank)
        index, count = 0, 1
        for axis, size in self.sizes.items():
            if axis in split:
                index, count = index * size + where[axis], count * size
        collects = not any(at for axis, at in where.items() if axis not in split)
        return DataShard(index, count, collects)

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
        """The layout that a configuration asks for."""
        return cls(**{axis: getattr(config, axis) for axis in AXES})

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which the rows of a batch are split."""
        return DATA_AXES

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that get rows of their own."""
        return self.dp * self.fsdp

    def rank(self, **where: int) -> int:
        """The rank at these coordinates; axes not named count as 0."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + where.get(axis, 0)
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """Ranks that differ in `axes` only, group by group; a rank is in exactly one.

        >>> Layout(fsdp=2, tp=2).groups("tp")
        [[0, 1], [2, 3]]
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            where = self.coordinates(rank)
            key = tuple(where[axis] for axis in AXES if axis not in axes)
            found.setdefault(key, []).append(rank)
        return list(found.values())


def check_layout(layout: Layout, world_size: int, shape: ModelShape | None = None) -> None:
    """Raise ConfigError for a layout that `world_size` ranks, or a model, can't take."""
    if layout.world_size != world_size:
        raise ConfigError(
            f"the layout {layout} is one of {layout.world_size} ranks, but there are {world_size}; "
            "make dp · fsdp · sp · tp · pp equal to the number of ranks"
        )
    if shape is None:
        return
    for axis, size, what, count in (
        ("tp", layout.tp, "num_attention_heads", shape.heads),
        ("tp", layout.tp, "intermediate_size", shape.intermediate),
        ("sp", layout.sp * layout.tp, "num_attention_heads", shape.heads),
    ):
        if count % size:
            name = "sp · tp" if size != getattr(layout, axis) else axis
            raise ConfigError(
                f"{name}={size} does not divide the model's {what}={count}; choose a divisor of it"
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
