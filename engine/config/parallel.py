"""How a role's model is sharded over its ranks, and what their processes take."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.config.base import Section


class ParallelConfig(Section):
    """A layout of ranks, and what each of them stores. The default is one rank.

    The world size is dp · fsdp · sp · tp · pp. `dp` and `fsdp` together are HYBRID_SHARD: shards
    inside a group of `fsdp` ranks, copies over `dp` groups.
    """

    dp: int = Field(1, ge=1, description="Copies of the model, each on its own rows")
    fsdp: int = Field(
        1, ge=1, description="Ranks that weights, gradients and moments are sharded over (FSDP2)"
    )
    sp: int = Field(1, ge=1, description="Ranks that each sequence is split over (Ulysses)")
    tp: int = Field(1, ge=1, description="Ranks that each matrix is split over")
    pp: int = Field(1, ge=1, description="Stages of layers, run in a pipeline (1F1B)")
    sequence_parallel: bool = Field(
        True, description="With tp: norms and residuals on a part of the tokens"
    )
    compute_dtype: Literal["", "float32", "bfloat16"] = Field(
        "", description="Of forward and backward; empty: the weights'. Masters stay float32"
    )
    packing: bool | Literal["auto"] = Field(
        "auto",
        description="Rows as one sequence without padding, a shared prompt computed once; auto: "
        "where that saves a twentieth of the positions",
    )
    offload_params: bool = Field(
        False, description="Keep weights in CPU memory between uses (fsdp)"
    )
    offload_optimizer: bool = Field(
        False, description="Keep the optimizer's moments in CPU memory between updates"
    )
    activation_checkpointing: bool = Field(
        False, description="Keep layers' inputs only and recompute the rest in backward"
    )


class PoolConfig(Section):
    """Roles that share one process, and what that process takes."""

    roles: tuple[str, ...] = Field(min_length=1, description="e.g. [actor, rollout]")
    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)
    resources: dict[str, float] = Field({}, description="Other Ray resources")
    labels: dict[str, str] = Field({}, description="Labels of the node, as Ray's selectors")
