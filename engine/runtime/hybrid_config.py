"""The settings of `hybrid_config`, and the layout of ranks that they give. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from engine.config import Section, explain
from engine.errors import ConfigError
from engine.parallel.layout import Layout, ModelShape, check_layout
from engine.parallel.rollout_layout import rollout_layout

_ELSEWHERE = ("pp_size", "sp_size")  # axes without an ordinary forward and backward pass


class HybridConfig(Section):
    """Sizes of the axes of ranks. `dp_size` and `fsdp_size` follow from the others if left out.

    `tp_size` is that of `generate`; training shards weights by `fsdp_sharding`, and splits
    matrices where `train_tp_size` says so.

    >>> HybridConfig.of({"train_tp_size": 2, "fsdp_sharding": "FULL_SHARD"}).layout(4)
    Layout(pp=1, dp=1, fsdp=2, sp=1, tp=2)
    """

    dp_size: int | None = Field(None, ge=1, description="Copies of the model")
    fsdp_size: int | None = Field(None, ge=1, description="Ranks that share a copy's weights")
    tp_size: int | None = Field(
        None, ge=1, description="Ranks that share each matrix in generate; None: train_tp_size"
    )
    train_tp_size: int = Field(1, ge=1, description="Ranks that share each matrix in training")
    rollout_tp_size: int | None = Field(None, ge=1, description="Another name of tp_size")
    fsdp_sharding: Literal["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"] = Field(
        "FULL_SHARD",
        description="Weights sharded over all data ranks, inside each node, or copied to each rank",
    )

    @classmethod
    def of(cls, values: Mapping[str, object] | None) -> Self:
        """Read a user's dictionary; ConfigError names a wrong key and the valid ones."""
        values = values or {}
        unknown = sorted(str(key) for key in values.keys() - cls.model_fields.keys())
        if unknown:
            elsewhere = unknown[0] in _ELSEWHERE
            hint = f"; RLTrainer spreads by {unknown[0][:2]} (actor.parallel)" if elsewhere else ""
            raise ConfigError(
                f"hybrid_config has no key {', '.join(map(repr, unknown))}; its keys are "
                f"{', '.join(cls.model_fields)}{hint}"
            )
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"hybrid_config: {explain(error)}") from None
        given = {config.tp_size, config.rollout_tp_size} - {None}
        if len(given) > 1:
            raise ConfigError(
                f"hybrid_config: tp_size={config.tp_size} and rollout_tp_size="
                f"{config.rollout_tp_size} are both that of generate; training's is train_tp_size"
            )
        return config

    @property
    def rollout_tp(self) -> int:
        """Ranks that share each matrix while they generate."""
        return self.tp_size or self.rollout_tp_size or self.train_tp_size

    def layout(self, world_size: int, ranks_per_node: int | None = None) -> Layout:
        """The training layout on `world_size` ranks, `ranks_per_node` of them on one machine.

        None: all of them are. Raises ConfigError where the sizes don't multiply to `world_size`.
        """
        self._require_ranks(world_size)
        data_ranks = max(1, world_size // self.train_tp_size)
        in_node = max(1, (ranks_per_node or world_size) // self.train_tp_size)
        dp, fsdp = self._data_axes(data_ranks, in_node)
        layout = Layout(dp=dp, fsdp=fsdp, tp=self.train_tp_size)
        check_layout(layout, world_size)
        return layout

    def check(self, config: Any, world_size: int, ranks_per_node: int | None = None) -> Layout:
        """`layout`, checked to be one that a model of this transformers configuration can take.

        Raises ConfigError where it can't, in training or in `generate`.
        """
        layout = self.layout(world_size, ranks_per_node)
        if layout.fsdp == layout.tp == self.rollout_tp == 1:
            return layout  # whole models only: any will do
        shape = ModelShape.of(config)
        check_layout(layout, world_size, shape)
        rollout_layout(layout, tp=self.rollout_tp)
        kv_heads = shape.kv_heads
        if shape.heads % self.rollout_tp or max(kv_heads, self.rollout_tp) % min(
            kv_heads, self.rollout_tp
        ):
            raise ConfigError(
                f"hybrid_config's tp_size={self.rollout_tp} does not share the model's "
                f"{shape.heads} attention heads and {kv_heads} key heads evenly; choose a divisor"
            )
        return layout

    def _require_ranks(self, world_size: int) -> None:
        """Raise ConfigError where the sizes need more ranks than there are."""
        training = self.train_tp_size * (self.dp_size or 1) * (self.fsdp_size or 1)
        asked = max(training, self.rollout_tp)
        if asked <= world_size:
            return
        names = ("dp_size", "fsdp_size", "tp_size", "train_tp_size", "rollout_tp_size")
        used = ", ".join(f"{n}={v}" for n in names if (v := getattr(self, n) or 1) > 1)
        there = "this process is alone" if world_size == 1 else f"there are {world_size}"
        raise ConfigError(
            f"hybrid_config's {used} needs {asked} ranks, but {there}; run it under torchrun with "
            f"{asked} processes (torchrun --nproc-per-node {asked} …), or leave the sizes out"
        )

    def _data_axes(self, data_ranks: int, in_node: int) -> tuple[int, int]:
        """Copies of the model, and ranks that share one."""
        if self.fsdp_sharding == "FULL_SHARD":
            if (self.dp_size or 1) > 1:
                raise ConfigError(
                    f"hybrid_config: dp_size={self.dp_size} keeps {self.dp_size} copies of the "
                    "model, and fsdp_sharding='FULL_SHARD' one; use 'HYBRID_SHARD'"
                )
            return 1, self.fsdp_size or data_ranks
        if self.fsdp_sharding == "NO_SHARD":
            if (self.fsdp_size or 1) > 1:
                raise ConfigError(
                    f"hybrid_config: fsdp_size={self.fsdp_size} shards the model and fsdp_sharding="
                    "'NO_SHARD' does not; use 'HYBRID_SHARD' or 'FULL_SHARD'"
                )
            return self.dp_size or data_ranks, 1
        if self.fsdp_size is None:
            shared = in_node if self.dp_size is None else max(1, data_ranks // self.dp_size)
            return self.dp_size or max(1, data_ranks // min(shared, data_ranks)), shared
        return self.dp_size or max(1, data_ranks // self.fsdp_size), self.fsdp_size
