"""GPU kinds that the planner's table does not have."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.config.base import Section


class GpuKindConfig(Section):
    """What one GPU can do, from its data sheet."""

    memory_gib: float = Field(gt=0, description="Of its own memory")
    tflops: float = Field(gt=0, description="Dense bfloat16, in 10^12 operations a second")
    memory_gbs: float = Field(gt=0, description="Bandwidth of its memory, 10^9 bytes a second")
    link_gbs: float = Field(
        32.0, gt=0, description="To GPUs of the same machine, each way, 10^9 bytes a second"
    )
    network_gbs: float = Field(
        12.5, gt=0, description="To other machines, a GPU, 10^9 bytes a second"
    )
    vendor: Literal["nvidia", "amd"] = "nvidia"
