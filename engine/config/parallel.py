"""How a role's model is spread over its ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.config.base import Section


class ParallelConfig(Section):
    """A layout of ranks, and what each of them keeps. One rank in all unless sizes say otherwise.

    The world size is dp · fsdp · sp · tp · pp. `dp` and `fsdp` together are HYBRID_SHARD: shards
    inside a group of `fsdp` ranks, copies over `dp` groups.
    """

    dp: int = Field(1, ge=1, description="Copies of the model, each on its own rows")
    fsdp: int = Field(
        1, ge=1, description="Ranks that share weights, gradients and moments (FSDP2)"
    )
    sp: int = Field(1, ge=1, description="Ranks that share each sequence's tokens (Ulysses)")
    tp: int = Field(1, ge=1, description="Ranks that share each matrix")
    pp: int = Field(1, ge=1, description="Stages of layers, run in a pipeline (1F1B)")
    sequence_parallel: bool = Field(
        True, description="Under tp: norms and residuals on a share of the tokens"
    )
    compute_dtype: Literal["", "float32", "bfloat16"] = Field(
        "", description="Of forward and backward; empty: the weights'. Masters stay float32"
    )
    packing: bool = Field(
        False, description="Rows end to end, without padding (flash or SDPA attention)"
    )
    offload_params: bool = Field(False, description="Weights wait in CPU memory (fsdp)")
    offload_optimizer: bool = Field(False, description="AdamW's moments wait in CPU memory")
    activation_checkpointing: bool = Field(
        False, description="Keep layers' inputs only and compute the rest again in backward"
    )
