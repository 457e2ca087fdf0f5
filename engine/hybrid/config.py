"""What `hybrid_config` may say, and the layout of ranks it comes to. No torch here."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from engine.config import Section, explain
from engine.errors import ConfigError
from engine.parallel.layout import Layout, ModelShape, check_layout


class HybridConfig(Section):
    """Sizes of the axes of ranks. `dp_size` and `fsdp_size` follow from the others if left out.

    >>> HybridConfig.of({"tp_size": 2, "fsdp_sharding": "FULL_SHARD"}).layout(4)
    Layout(pp=1, dp=1, fsdp=2, sp=1, tp=2)
    """

    dp_size: int | None = Field(None, ge=1, description="Copies of the model")
    fsdp_size: int | None = Field(None, ge=1, description="Ranks that share a copy's weights")
    sp_size: int = Field(1, ge=1, description="Ranks that share each sequence's tokens")
    tp_size: int = Field(1, ge=1, description="Ranks that share each matrix")
    pp_size: int = Field(1, ge=1, description="Stages of layers")
    fsdp_sharding: Literal["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"] = Field(
        "FULL_SHARD",
        description="Weights sharded over all data ranks, inside each node, or copied to each rank",
    )

    @classmethod
    def of(cls, values: dict[str, Any] | None) -> Self:
        """Read a user's dictionary; ConfigError names a wrong key and the valid ones."""
        values = values or {}
        unknown = sorted(str(key) for key in values.keys() - cls.model_fields.keys())
        if unknown:
            raise ConfigError(
                f"hybrid_config has no key {', '.join(map(repr, unknown))}; its keys are "
                f"{', '.join(cls.model_fields)}"
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"hybrid_config: {explain(error)}") from None

    def layout(self, world_size: int, ranks_per_node: int | None = None) -> Layout:
        """The layout on `world_size` ranks, `ranks_per_node` of them on one machine (None: all).

        Raises ConfigError where the sizes don't multiply to `world_size`.
        """
        rest = {"sp": self.sp_size, "tp": self.tp_size, "pp": self.pp_size}
        others = self.sp_size * self.tp_size * self.pp_size
        if world_size == 1:
            self._refuse_more_than_one(others)
        data_ranks = max(1, world_size // others)
        in_node = max(1, (ranks_per_node or world_size) // others)
        dp, fsdp = self._data_axes(data_ranks, in_node)
        layout = Layout(dp=dp, fsdp=fsdp, **rest)
        check_layout(layout, world_size)
        return layout

    def check(
        self, shape: ModelShape, world_size: int, ranks_per_node: int | None = None
    ) -> Layout:
        """`layout`, checked to be one that a model of `shape` can take."""
        layout = self.layout(world_size, ranks_per_node)
        check_layout(layout, world_size, shape)
        return layout

    def _refuse_more_than_one(self, others: int) -> None:
        asked = others * (self.dp_size or 1) * (self.fsdp_size or 1)
        if asked > 1:
            names = ("dp_size", "fsdp_size", "sp_size", "tp_size", "pp_size")
            used = ", ".join(f"{n}={v}" for n in names if (v := getattr(self, n) or 1) > 1)
            raise ConfigError(
                f"hybrid_config's {used} needs {asked} ranks, but this process is alone; run it "
                f"under torchrun with {asked} processes (torchrun --nproc-per-node {asked} …), or "
                "leave the sizes out"
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
