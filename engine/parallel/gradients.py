"""Gradients of a whole layout: their sum over replicas, their norm and clipping by it.

Who sums what. A backward pass leaves on each rank the gradients of that rank's tokens:
- a layout that shares weights (fsdp, sp): FSDP sums over dp, fsdp and sp, in backward;
- any other: `all_reduce_gradients` sums over dp, after the last backward of a step;
- tp: DTensor sums inside a layer; what it leaves as partial sums, `redistribute_gradients` adds up;
- pp: each stage has its own parameters; `pipeline_parallel` sums the gradients of a tied embedding.
Nothing divides: losses carry global denominators.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.parallel.fsdp import shards_weights
from engine.parallel.layout import AXES
from engine.parallel.module_shards import local_tensor
from engine.parallel.process_groups import Ranks


def redistribute_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Bring DTensor gradients into their parameters' placements, adding up partial sums.

    All ranks of the meshes must call it with the same parameters.
    """
    for parameter in parameters:
        grad = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(grad, DTensor):
            continue
        if grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def zero_gradient(parameter: nn.Parameter) -> Tensor:
    """Make a gradient of 0, in the dtype that the parameter's are accumulated in."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype or torch.float32)


@torch.no_grad()
def all_reduce_gradients(
    parameters: Iterable[nn.Parameter], ranks: Ranks, bucket_elements: int = 16 << 20
) -> None:
    """Sum gradients over the copies of the model, in float32, one all-reduce a bucket.

    Where some ranks have none it counts as 0, and all have one afterwards. All ranks must call it
    with the same parameters in the same order. It does nothing where FSDP sums.
    """
    group = None if shards_weights(ranks) else ranks.group("dp")
    if group is None:
        return
    trained = [p for p in parameters if p.requires_grad]
    redistribute_gradients(trained)
    _fill_missing(trained, group)
    for parameter in trained:
        grad = parameter.grad  # all ranks must have its elements in the same order
        if grad is not None and not local_tensor(grad).is_contiguous():
            parameter.grad = grad.clone(memory_format=torch.contiguous_format)
    grads = [local_tensor(p.grad) for p in trained if p.grad is not None]
    for bucket in _buckets(grads, bucket_elements):
        if len(bucket) == 1 and bucket[0].dtype == torch.float32:
            dist.all_reduce(bucket[0], group=group)
            continue
        flat = torch.cat([part.float() for part in bucket])
        dist.all_reduce(flat, group=group)
        for part, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            part.copy_(total)


def global_grad_norm(
    parameters: Iterable[nn.Parameter],
    ranks: Ranks,
    tied_duplicates: Collection[nn.Parameter] = frozenset(),
) -> float:
    """Return the 2-norm of the whole layout's gradient: the same number on every rank.

    Every element counts once, however many ranks hold it; those of `tied_duplicates` (an end of
    a tied embedding whose other end is on another stage) not at all. All ranks must call it.
    Gradients must be summed already; partial sums of tp are added up here.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    redistribute_gradients(with_grad)
    skipped = {id(p) for p in tied_duplicates}
    counted = [p for p in with_grad if id(p) not in skipped and _counts_here(p, ranks)]
    grads = [local_tensor(p.grad) for p in counted if p.grad is not None]
    squares = 0.0
    for alike in _by_kind([grad for grad in grads if grad.numel()]):
        norms = torch._foreach_norm(alike, 2, dtype=torch.float32)
        squares += float(torch.stack(norms).double().square().sum())
    if ranks.mesh is None:
        return math.sqrt(squares)
    local_squares = torch.tensor([squares], dtype=torch.float64, device=ranks.mesh.device_type)
    everyone = [torch.empty_like(local_squares) for _ in range(ranks.layout.world_size)]
    dist.all_gather(everyone, local_squares)
    return math.sqrt(math.fsum(torch.cat(everyone).tolist()))  # fsum: no order, no rounding


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    ranks: Ranks,
    max_norm: float,
    tied_duplicates: Collection[nn.Parameter] = frozenset(),
) -> float:
    """Scale gradients so that their `global_grad_norm` is at most `max_norm`; return it as it was.

    A norm that is not finite is returned, and nothing scaled: the caller must not take the step.
    """
    parameters = list(parameters)
    norm = global_grad_norm(parameters, ranks, tied_duplicates)
    factor = max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
    if math.isfinite(norm) and factor < 1.0:
        for grads in _by_kind([local_tensor(p.grad) for p in parameters if p.grad is not None]):
            torch._foreach_mul_(grads, factor)
    return norm


def _counts_here(parameter: nn.Parameter, ranks: Ranks) -> bool:
    """Whether this rank is the first of those that hold the same elements of `parameter`."""
    holders = set(AXES) - {"pp"}  # axes along which ranks hold the same ones
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            axes = set(name.split("_"))  # a flattened mesh is named after all its axes
            assert axes <= set(AXES), f"a mesh dimension is named {name!r}"
            if not placement.is_replicate():  # is_shard() is False for FSDP's _StridedShard
                holders -= axes
    coordinates = ranks.layout.coordinates(ranks.rank)
    return all(coordinates[axis] == 0 for axis in holders)


def _by_kind(tensors: Sequence[Tensor]) -> Collection[list[Tensor]]:
    """Group tensors of one device and dtype, as foreach kernels want them."""
    groups: dict[object, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return groups.values()


def _fill_missing(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Give a gradient of 0 to parameters that have one on another rank of `group` only."""
    if not parameters:
        return
    has = [p.grad is not None for p in parameters]
    some = torch.tensor(has, dtype=torch.uint8, device=local_tensor(parameters[0]).device)
    dist.all_reduce(some, op=dist.ReduceOp.MAX, group=group)
    for parameter, elsewhere in zip(parameters, some.tolist(), strict=True):
        if elsewhere and parameter.grad is None:
            parameter.grad = zero_gradient(parameter)


def _buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield flat views of all elements, in runs of at most `limit`; a large tensor is cut."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        for part in tensor.view(-1).split(limit):
            if size + part.numel() > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(part)
            size += part.numel()
    if bucket:
        yield bucket
