"""The arguments of `vllm.LLM` from this engine's options: those of a CPU, and those of a GPU.

On a GPU vLLM does what its users expect: a KV cache in the memory that its share leaves, compiled
forward passes and CUDA graphs, prompts in chunks. On a CPU compiling takes 12-38 s and gains
nothing, and a prompt goes whole: a part of one rewinds its request's generator, which a CPU's
can't.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.rollout.vllm.engine_kwargs import check_engine_kwargs, passed_through

if TYPE_CHECKING:
    from engine.rollout.vllm.options import VllmOptions

CPU_KV_CACHE_MB = 256
_STEP_TOKENS = 8192  # of one forward pass, at least a whole prompt's
_BLOCK = 32  # tokens a KV block; a group shares its prompt's full blocks, and 128 is CPU's default
_CHECKED_ONLY = 0.01  # a share that vLLM compares with free memory, and doesn't fill
_BACKENDS = {"in_process": "uni", "workers": "mp", "ranks": "external_launcher"}
_QUANTIZATIONS = {"fp8": "fp8_per_block"}  # vLLM's names for quantisation while loading


@dataclass(frozen=True, slots=True)
class Tuning:
    """What of vLLM a run may tune: the settings of the same names in `VllmConfig`."""

    gpu_memory_utilization: float = 0.5  # of each GPU, weights and activations included
    enforce_eager: bool = False
    enable_chunked_prefill: bool | None = None  # None: on a GPU
    enable_prefix_caching: bool = True
    max_num_batched_tokens: int | None = None  # of one forward pass; None: the device's default
    quantization: str = ""  # of vLLM's weights, e.g. "fp8"
    engine_kwargs: Mapping[str, object] = field(default_factory=dict)  # by vLLM's names

    def check(self, *, in_process: bool, kv_cache_memory_mb: int | None, lora: str) -> None:
        """Raise ConfigError for what can't be on any machine, before anything is started."""
        check_engine_kwargs(self.engine_kwargs, in_process=in_process)
        default = Tuning().gpu_memory_utilization
        if kv_cache_memory_mb is not None and self.gpu_memory_utilization != default:
            raise ConfigError(
                f"rollout.vllm.gpu_memory_utilization={self.gpu_memory_utilization} has no effect "
                f"beside rollout.kv_cache_memory_mb={kv_cache_memory_mb}; set one of them"
            )
        if self.quantization and lora == "adapter":
            raise ConfigError(
                f"rollout.vllm.quantization={self.quantization} with rollout.vllm.lora=adapter: "
                "weights are quantised with the adapters merged into them; set lora=merged"
            )

    def check_here(
        self, *, on_gpu: bool, dtype: str, max_model_len: int, max_num_seqs: int
    ) -> None:
        """Raise ConfigError for what can't be on this machine and with this model."""
        if self.enable_chunked_prefill and not on_gpu:
            raise ConfigError(
                "rollout.vllm.enable_chunked_prefill=true on a CPU: a prompt in parts would draw "
                "other tokens for the same seed; leave it out"
            )
        if self.quantization and not on_gpu:
            raise ConfigError(
                f"rollout.vllm.quantization={self.quantization} on a CPU: vLLM quantises on GPUs; "
                "leave it out"
            )
        if self.quantization and dtype == "float32":
            raise ConfigError(
                f"rollout.vllm.quantization={self.quantization} of float32 weights: vLLM computes "
                "beside it in bfloat16 or float16; set rollout.vllm.dtype=bfloat16"
            )
        tokens = self.max_num_batched_tokens
        whole = self.enable_chunked_prefill is False or not on_gpu
        if tokens is not None and whole and tokens < max_model_len:
            raise ConfigError(
                f"rollout.vllm.max_num_batched_tokens={tokens} is less than a prompt and its "
                f"completion ({max_model_len} tokens), and prompts aren't computed in chunks; "
                f"raise it to {max_model_len}"
            )
        if tokens is not None and tokens < max_num_seqs:
            raise ConfigError(
                f"rollout.vllm.max_num_batched_tokens={tokens} is less than rollout.max_num_seqs="
                f"{max_num_seqs}, which each decode one token a pass; raise it, or lower that"
            )


def engine_arguments(options: VllmOptions) -> dict[str, object]:
    """Keyword arguments of `vllm.LLM`, but for the model's folder and vLLM's own classes."""
    tuning = options.tuning
    arguments: dict[str, object] = {
        "dtype": options.dtype,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": options.max_model_len,
        "enable_prefix_caching": tuning.enable_prefix_caching,
        "tensor_parallel_size": options.tensor_parallel_size,
        "distributed_executor_backend": _BACKENDS[options.mode],
        "seed": options.seed,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if tuning.quantization:
        name = tuning.quantization
        arguments["quantization"] = _QUANTIZATIONS.get(name, name)
    if options.adapter_rank:
        arguments |= {"enable_lora": True, "max_loras": 1}
    arguments |= _on_gpu(options) if options.on_gpu else _on_cpu(options)
    return arguments | passed_through(tuning.engine_kwargs)


def _on_gpu(options: VllmOptions) -> dict[str, object]:
    tuning = options.tuning
    chunked = tuning.enable_chunked_prefill is not False
    return {
        "enforce_eager": tuning.enforce_eager,
        "enable_chunked_prefill": chunked,
        "moe_backend": "triton",  # others shuffle experts' weights, where updates don't fit
        "max_num_batched_tokens": tuning.max_num_batched_tokens
        or (None if chunked else _step_tokens(options)),
        **_kv_cache(options),
    }


def _on_cpu(options: VllmOptions) -> dict[str, object]:
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": options.tuning.max_num_batched_tokens or _step_tokens(options),
        "block_size": _BLOCK,
        **_kv_cache(options),
    }


def _kv_cache(options: VllmOptions) -> dict[str, object]:
    """The cache's size: given in bytes of each rank, or what vLLM's share of memory leaves."""
    if options.kv_cache_memory_mb is None:
        return {"gpu_memory_utilization": options.tuning.gpu_memory_utilization}
    size = (options.kv_cache_memory_mb << 20) // options.tensor_parallel_size
    return {"kv_cache_memory_bytes": size, "gpu_memory_utilization": _CHECKED_ONLY}


def _step_tokens(options: VllmOptions) -> int:
    return max(_STEP_TOKENS, options.max_num_seqs, options.max_model_len)
