"""Patches of vLLM that keep its weights unpacked: readable, writable, shareable.

With the experts of a mixture-of-experts model on a CPU, computed from unpacked weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from engine.errors import RolloutError
from engine.rollout.trainer_model import linear_function

# A mixture's experts on a CPU, computed from unpacked weights.
#
# vLLM packs them for its grouped kernel once, when the engine starts, so that no update could
# reach
# them: its loaders would write unpacked numbers into a packed tensor. Here each expert is two
# plain
# products, from weights as the policy has them.

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def keep_experts_unpacked() -> Callable[[], None]:
    """Let vLLM's CPU experts stay as they are loaded; the function returned restores its packing.

    Engines that were made meanwhile keep theirs unpacked. Does nothing where vLLM is for GPUs.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return lambda: None
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts = cpu_moe.CPUUnquantizedExperts
    original = experts.process_weights_after_loading

    def unpacked(self: Any, layer: object) -> None:
        self.apply = partial(apply_experts, (self.w1_bias, self.w2_bias))

    def undo() -> None:
        experts.process_weights_after_loading = original

    experts.process_weights_after_loading = unpacked
    return undo


def apply_experts(
    biases: tuple[Tensor | None, Tensor | None],
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Enum,
    *,
    expert_map: Tensor | None,
    apply_router_weight_on_input: bool,
    **others: object,
) -> None:
    """Fill `output` `[T, H]` with the weighted sums of each token's experts, as vLLM's kernel does.

    `w1` `[E, 2·I, H]` has an expert's gate above its up projection, `w2` `[E, H, I]` leads back;
    `topk_ids` and `topk_weights` are `[T, k]`. `expert_map` gives a rank's own numbers of experts,
    -1 for those elsewhere. Raises RolloutError for an activation without a gate in the upper half.
    """
    act = _ACTIVATIONS.get(activation.value)
    if act is None:
        raise RolloutError(
            f"experts with the activation {activation.value} can't be decoded by vLLM on a CPU; "
            "use rollout.engine=native"
        )
    ids = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()]
    output.zero_()
    linear = linear_function(w1)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        first, second = (bias[expert] if bias is not None else None for bias in biases)
        gate, up = linear(hidden_states[rows], w1[expert], first).chunk(2, dim=-1)
        found = linear(act(gate) * up, w2[expert], second)
        if not apply_router_weight_on_input:  # else the input has it already
            found = found * topk_weights[rows, slots, None]
        output.index_add_(0, rows, found.to(output.dtype))


# Patches of vLLM that keep its weights unpacked: readable, writable, shareable.
#
# They are active in the trainer's process while an engine starts, and always in vLLM's workers.


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
