"""FSDP2 (`fully_shard`): sharding a model, and forward passes for which FSDP gathers the weights.

Layouts that shard no weights (`shards_weights` is False) don't need it: their gradients are summed
by `gradients.all_reduce_gradients`. Activation checkpointing is here because it must come before
sharding; it works without.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from engine.config import ParallelConfig
from engine.parallel.process_groups import SHARD_AXES, Ranks

T = TypeVar("T")

_RUN = "_run_with_weights"  # the method of a sharded model that `run_forward` calls
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "mkldnn::_linear_pointwise")
THIN = 8  # from this ratio of its sides on, a matrix is an adapter's or a router's


def shards_weights(ranks: Ranks) -> bool:
    """Tell whether this layout shards weights, so that `shard_model` does something."""
    return ranks.size(*SHARD_AXES) > 1


def shard_model(
    model: nn.Module, ranks: Ranks, config: ParallelConfig, *, layers: Sequence[nn.Module]
) -> None:
    """Shard every weight in place: one FSDP unit a layer, and one for the rest.

    Weights are sharded over the axes `fsdp` and `sp` together, and replicated over `dp`. Each rank
    must have the same weights, full or as tensor-parallel DTensors of the mesh "tp". Parameters
    become DTensors; backward leaves in them the SUM of the gradients over dp, fsdp and sp, reduced
    in float32: losses are to be divided by global counts. Stored weights keep their dtype; gathered
    ones have `config.compute_dtype`. Tensors of a Parameter subclass (quantised weights) are
    replicated and not trained. A layout that shards no weights leaves the model as it is.
    """
    if not shards_weights(ranks):
        return
    mesh = ranks.submesh(*(axis for axis in SHARD_AXES if ranks.size(axis) > 1))
    if ranks.size("dp") > 1:  # two-dimensional: (copies, shards)
        mesh = DeviceMesh._concatenate([ranks.submesh("dp"), mesh])
    dtype = getattr(torch, config.compute_dtype) if config.compute_dtype else None
    precision = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = fsdp.OffloadPolicy()
    if config.offload_policy:
        offload = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    special = {
        p
        for p in model.parameters()
        if type(p) is not nn.Parameter and not isinstance(p.data, DTensor)
    }
    for module in (*layers, model):
        fsdp.fully_shard(
            module,
            mesh=mesh,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=special,
            shard_placement_fn=partial(_placement, ranks.size(*SHARD_AXES)),
        )
        assert isinstance(module, fsdp.FSDPModule)
        module.set_gradient_divide_factor(1.0)  # of this module alone: the default is an average
        module.set_force_sum_reduction_for_comms(True)  # else it multiplies, which gloo can't
        module.set_reduce_scatter_unused_params(True, recurse=False)
    setattr(model, _RUN, MethodType(_run, model))
    fsdp.register_fsdp_forward_method(model, _RUN)


def run_forward(model: nn.Module, function: Callable[[], T]) -> T:
    """Call `function()`, which may read any of `model`'s weights and run any of its modules.

    For a forward pass other than `model(…)`, such as the backbone, then the head on some positions.
    Tensors to differentiate must be in the result (a tensor, or a dict, list, tuple or dataclass of
    them). Without FSDP it only calls the function. All ranks of the shard group must call it
    equally often, and equally often with gradients.
    """
    if not isinstance(model, fsdp.FSDPModule):
        return function()
    try:
        result: T = getattr(model, _RUN)(function)
    except BaseException:
        model.reset_iter_state()  # else the next pass starts inside this one
        raise
    if not torch.is_grad_enabled():
        model.reshard()  # no backward will; kept weights would outlive the next update
    return result


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that `model`'s parameters are the trained shards."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def reduce_over_copies(model: nn.Module, reduce: bool) -> None:
    """Set whether backward passes also sum gradients over `dp`, which one pass a step must do.

    The others sum over the shard group alone, and keep their part in float32.
    """
    if isinstance(model, fsdp.FSDPModule):
        model.set_requires_all_reduce(reduce)


class OffloadedWeights:
    """A model's weights in CPU memory except while `on_device` is entered, as verl offloads them.

    Outside they can't be read: their storages on the device are empty. Parameters, gradients, hooks
    and views of the shards stay what they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._users = model, 0
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        storages = {s._cdata: s for s in (part.untyped_storage() for part in parts)}
        self._bytes = [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in storages.values()
        ]
        self._copies = [
            torch.empty_like(b, device="cpu", pin_memory=b.is_cuda) for b in self._bytes
        ]
        self._offload()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the weights on the device in the block, and in blocks inside it."""
        if not self._users:
            for part, copy in zip(self._bytes, self._copies, strict=True):
                part.untyped_storage().resize_(len(copy))
                part.copy_(copy, non_blocking=True)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._offload()

    def _offload(self) -> None:
        reshard(self._model)
        for part, copy in zip(self._bytes, self._copies, strict=True):
            copy.copy_(part, non_blocking=True)  # storages are reused in the stream's order
            part.untyped_storage().resize_(0)
        if self._copies and self._bytes[0].is_cuda:
            torch.cuda.empty_cache()  # rollout engines have allocators of their own


def checkpoint_activations(
    layers: Sequence[nn.Module], mode: bool | str = True, *, offload: bool = False
) -> None:
    """Make each layer, in place, keep its inputs only and compute again in backward.

    In the mode "selective" it also keeps the outputs of attention and of every second matrix
    product. `offload`: until then a GPU's inputs are in CPU memory. Call it before `shard_model`.
    Names of parameters stay as they are.
    """
    options: Any = {"context_fn": _selective_contexts} if mode == "selective" else {}
    for layer in layers:
        run = partial(checkpoint, layer.forward, use_reentrant=False, **options)
        offloads = offload and torch.cuda.is_available()
        layer.forward = partial(_checkpointed, layer.forward, run, offloads)


def _checkpointed(plain: Any, run: Any, offload: bool, *args: Any, **kwargs: Any) -> object:
    if not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    # Of the inputs: inside, what is saved has the checkpoint's own hooks.
    with save_on_cpu(pin_memory=True) if offload else nullcontext():
        return run(*args, **kwargs)


def _selective_contexts() -> Any:
    """Return contexts of a layer's forward pass and of its recomputation, as torchtitan has them.

    Of q, k, v, o, gate, up and down this keeps k, o and up. Thin products cost little to repeat,
    and aren't counted.
    """
    counted = itertools.count(1)

    def policy(context: object, operator: Any, *args: Any, **kwargs: Any) -> bool:
        if (name := operator.name()) not in _PRODUCTS:
            return "attention" in name or "_attn" in name
        sides = args[1 + (name == "aten::addmm")].shape[-2:]  # of the matrix
        return THIN * min(sides) >= max(sides) and next(counted) % 2 == 0

    return create_selective_checkpoint_contexts(policy)


def _run(model: nn.Module, function: Callable[[], T]) -> T:
    return function()  # FSDP's hooks are around it


def _placement(shards: int, parameter: nn.Parameter) -> Shard | None:
    """Return the dimension to cut: the second where the ranks don't divide a first of experts."""
    few = parameter.dim() > 2 and parameter.shape[0] % shards
    return Shard(1) if few and parameter.shape[1] % shards == 0 else None
