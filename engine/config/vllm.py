"""vLLM's own settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.config.base import Options, Section


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
    sleep: Literal[0, 1, 2] | None = Field(
        None,
        description="Between rollouts free vLLM's device memory: 1 keeps weights on the host, 2 "
        "throws them away; 0: keep all; null: 2 on a GPU. Weights that are the policy's own stay",
    )
    gpu_memory_utilization: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of each GPU's memory for vLLM: weights, activations and KV cache. CPUs: "
        "see rollout.kv_cache_memory_mb",
    )
    enforce_eager: bool = Field(
        False, description="Neither CUDA graphs nor compilation; a CPU has none anyway"
    )
    enable_chunked_prefill: bool | None = Field(
        None, description="Compute long prompts in parts, beside decoding; null: on a GPU"
    )
    enable_prefix_caching: bool = Field(
        True, description="Compute what prompts begin with once, such as a group's prompt"
    )
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Tokens of one forward pass; null: vLLM's default for the device"
    )
    quantization: Literal["", "fp8", "fp8_per_tensor", "fp8_per_channel"] = Field(
        "",
        description="Quantise vLLM's weights at each update, so they are a copy; fp8: in blocks of "
        "128 x 128. The policy needs bfloat16 or float16, or rollout.vllm.dtype",
    )
    engine_kwargs: Options = Field(
        {}, description="Further arguments of vLLM's engine, by its names, such as kv_cache_dtype"
    )
