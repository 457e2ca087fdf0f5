"""Patches of vLLM that keep its weights unpacked: readable, writable, shareable.

They are active in the trainer's process while an engine starts, and always in vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from engine.rollout.linear import linear_function
from engine.rollout.vllm.cpu_experts import keep_experts_unpacked


def keep_weights_unpacked() -> Callable[[], None]:
    """Replace vLLM's choice of CPU kernels, for matrices and for a mixture's experts.

    The function returned restores it.

    vLLM's own choice packs matrices, and packed ones can't be shared with the trainer or updated.
    """
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            original(layer, remove_weight=remove_weight)
            return
        layer.cpu_linear = linear_function(layer.weight)

    pack_experts = keep_experts_unpacked()

    def undo() -> None:
        utils.dispatch_cpu_unquantized_gemm = original
        pack_experts()

    utils.dispatch_cpu_unquantized_gemm = dispatch
    return undo


@contextmanager
def unpacked_weights() -> Iterator[None]:
    """`keep_weights_unpacked` for a block."""
    undo = keep_weights_unpacked()
    try:
        yield
    finally:
        undo()


@contextmanager
def weights_outside_pool() -> Iterator[None]:
    """Let vLLM allocate its weights in ordinary device memory, which `sleep` doesn't free.

    The trainer will share them.
    """
    from vllm.v1.worker import gpu_worker

    worker = gpu_worker.Worker
    original = worker._maybe_get_memory_pool_context

    def pool(self: object, tag: str) -> AbstractContextManager[object]:
        return nullcontext() if tag == "weights" else original(self, tag)

    worker._maybe_get_memory_pool_context = pool
    try:
        yield
    finally:
        worker._maybe_get_memory_pool_context = original


def inspect_in_this_process(architecture: str) -> None:
    """Tell vLLM what its class for `architecture` can do, which it asks of a process of its own.

    That process, on whose ten seconds each start without vLLM's cache waits, is to keep CUDA out of
    this one.
    """
    from vllm import ModelRegistry

    if known := ModelRegistry.models.get(architecture):
        ModelRegistry.register_model(architecture, known.load_model_cls())


def skip_compilation() -> None:
    """Replace two small functions that vLLM compiles at their first call, for many seconds."""
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = _count_at_least
    masked = vocab_parallel_embedding.get_masked_input_and_mask
    plain = getattr(masked, "_torchdynamo_orig_callable", masked)
    vocab_parallel_embedding.get_masked_input_and_mask = plain


def _count_at_least(x: Tensor, values: Tensor) -> Tensor:
    """Rank of each token: entries of x `[B, V]` that are `values` `[B, 1]` or more, `[B]`."""
    return (x >= values).sum(-1)
