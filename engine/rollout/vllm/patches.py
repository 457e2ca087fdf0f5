"""Patches of vLLM's private code; `private_names.yaml` says what each is for.

The first five patches are active in the trainer's process while an engine starts, and always in
vLLM's workers; the others are of the process that starts the engine.
"""

import gc
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engine.errors import RolloutError
from engine.rollout.trainer_model import linear_function

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute in a block."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def experts_unpacked() -> Iterator[None]:
    """Let experts of CPU models that are loaded in a block stay unpacked."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def unpacked(self: Any, layer: object) -> None:
        self.apply = partial(apply_experts, (self.w1_bias, self.w2_bias))

    with replaced(cpu_moe.CPUUnquantizedExperts, "process_weights_after_loading", unpacked):
        yield


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
    **unused: object,
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
        outputs = linear(act(gate) * up, w2[expert], second)
        if not apply_router_weight_on_input:  # else the input has it already
            outputs = outputs * topk_weights[rows, slots, None]
        output.index_add_(0, rows, outputs.to(output.dtype))


@contextmanager
def weights_unpacked() -> Iterator[None]:
    """Let matrices and experts of CPU models that are made in a block stay unpacked."""
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            original(layer, remove_weight=remove_weight)
            return
        layer.cpu_linear = linear_function(layer.weight)

    with replaced(utils, "dispatch_cpu_unquantized_gemm", dispatch), experts_unpacked():
        yield


@contextmanager
def weights_outside_pool() -> Iterator[None]:
    """Let vLLM allocate its weights in ordinary device memory, which `sleep` doesn't free."""
    from vllm.v1.worker import gpu_worker

    original = gpu_worker.Worker._maybe_get_memory_pool_context

    def pool(self: object, tag: str) -> AbstractContextManager[object]:
        return nullcontext() if tag == "weights" else original(self, tag)

    with replaced(gpu_worker.Worker, "_maybe_get_memory_pool_context", pool):
        yield


def inspect_in_this_process(architecture: str) -> None:
    """Tell vLLM what its class for `architecture` can do; else it starts a process to find out."""
    from vllm import ModelRegistry

    if registered := ModelRegistry.models.get(architecture):
        ModelRegistry.register_model(architecture, registered.load_model_cls())


def skip_compilation() -> None:
    """Replace the two small functions by ones that are not compiled."""
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.v1.sample import sampler

    # The rank of each token: how many entries of x [B, V] are `values` [B, 1] or more.
    sampler.batched_count_greater_than = lambda x, values: (x >= values).sum(-1)
    masked = vocab_parallel_embedding.get_masked_input_and_mask
    plain = getattr(masked, "_torchdynamo_orig_callable", masked)
    vocab_parallel_embedding.get_masked_input_and_mask = plain


@contextmanager
def launched_by_trainer(groups: Sequence[Sequence[int]]) -> Iterator[None]:
    """Let vLLM's external launcher find this process's rank, and make `groups` its own.

    vLLM takes adjacent ranks for a group, and torch sorts them, where a rank's place in its group
    is the index of its shard. vLLM also names its shared memory after the launcher's address, which
    is a constant: two jobs on a machine would share it.
    """
    from vllm.distributed import parallel_state
    from vllm.distributed.aux_output_connector import worker
    from vllm.v1.executor import uniproc_executor

    rank, order = dist.get_rank(), [rank for group in groups for rank in group]
    names = [uuid.uuid4().hex]
    dist.broadcast_object_list(names, src=0)
    form = parallel_state.init_model_parallel_group
    on_gpu = torch.cuda.is_available()
    index = torch.cuda.current_device() if on_gpu else int(os.environ.get("LOCAL_RANK", rank))
    address = f"file:///{names[0]}", rank, index

    def init_in_order(group_ranks: list[list[int]], *args: object, **options: object) -> object:
        return form([[order[at] for at in group] for group in group_ranks], *args, **options)

    with (
        replaced(dist, "new_group", partial(dist.new_group, sort_ranks=False)),
        replaced(parallel_state, "init_model_parallel_group", init_in_order),
        replaced(
            uniproc_executor.ExecutorWithExternalLauncher, "_distributed_args", lambda _: address
        ),
        # Each rank has a scheduler, which reads experts from its own worker alone.
        replaced(worker, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True)),
    ):
        yield


@contextmanager
def inspectable_objects() -> Iterator[None]:
    """Let vLLM's inspection pass objects whose `__dict__` is no dictionary, such as llvmlite's.

    llvmlite comes with numba, which speculation with n-grams loads: no engine could start after it.
    """
    from vllm.triton_utils import dispatcher

    def attributes(value: object) -> Mapping[str, object]:
        return value.__dict__ if isinstance(value.__dict__, Mapping) else {}

    names = vars(dispatcher)
    names["vars"] = attributes
    try:
        yield
    finally:
        del names["vars"]


def form_expert_groups() -> None:
    """Form the groups of experts, which engines of one process share, where the first had none."""
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


def keep_process_groups() -> None:
    """Let an engine that ends free its device memory alone."""
    from vllm.v1.engine import core
    from vllm.v1.executor import uniproc_executor as executors

    def free_memory() -> None:
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    vars(core)["cleanup_dist_env_and_memory"] = free_memory
    # As of 0.33 its own ends the model's groups.
    executors.ExecutorWithExternalLauncher.shutdown = executors.UniProcExecutor.shutdown
