"""A mixture's experts on a CPU, computed from unpacked weights.

vLLM packs them for its grouped kernel once, when the engine starts, so that no update could reach
them: its loaders would write unpacked numbers into a packed tensor. Here each expert is two plain
products, from weights as the policy has them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from engine.errors import RolloutError
from engine.rollout.linear import linear_function

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
