"""vLLM's own settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.config.base import Section


class VllmConfig(Section):
    """A vLLM engine (`rollout.engine=vllm`)."""

    in_process: bool = Field(
        True,
        description="In the policy's processes, on its own storage where layouts agree; false: in "
        "rollout.tensor_parallel_size processes of vLLM's own for each of them",
    )
    dtype: Literal["", "float32", "bfloat16", "float16"] = Field(
        "", description="Of vLLM's weights; empty: the policy's, which is what lets it share them"
    )
    lora: Literal["merged", "adapter"] = Field(
        "merged", description="A policy's adapters: merged into vLLM's weights, or vLLM's own LoRA"
    )
    bucket_mb: int = Field(64, ge=1, description="Weights on their way to vLLM's processes at once")
    sleep: Literal[0, 1, 2] = Field(
        0,
        description="Between rollouts free vLLM's device memory: 1 keeps weights on the host, 2 "
        "throws them away; 0: keep all. Weights that are the policy's own stay",
    )
