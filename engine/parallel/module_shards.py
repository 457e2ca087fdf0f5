"""The shards of a module, and full tensors from and into a model sharded over ranks.

Shards are read from the module's parameters, so they are right for any layout. Full tensors, one
at a time, are for Hugging Face folders and checkpoints of other layouts; weights for a rollout
engine go through `exchange`, which sends slices.
"""

import itertools
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as DTensorShard
from torch.distributed.tensor.placement_types import _StridedShard

from engine.errors import CheckpointError, ConfigError
from engine.parallel import fsdp
from engine.parallel.exchange import view
from engine.parallel.process_groups import Ranks
from engine.parallel.shard_maps import Box, Index, Shard, ShardedParameter, ShardMap, chunk

# From a module's parameter name to its name in the whole model; None for what is left out.
Rename = Callable[[str], str | None]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that this rank stores: its own storage, without a graph."""
    part = tensor.detach()
    if isinstance(part, DTensor):
        part = part.to_local()
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part


def local_tensors(model: nn.Module, rename: Rename | None = None) -> dict[str, Tensor]:
    """Return this rank's part of each parameter, without copies: what an Exchange sends from."""
    return {name: local_tensor(parameter) for name, parameter in named_parameters(model, rename)}


def named_parameters(model: nn.Module, rename: Rename | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters by their names in the whole model."""
    for name, parameter in model.named_parameters():
        full_name = rename(name) if rename else name
        if full_name is not None:
            yield full_name, parameter


def gather_shard_map(
    model: nn.Module, group: dist.ProcessGroup | None = None, rename: Rename | None = None
) -> ShardMap:
    """Gather the shards of all ranks of `group`, which must all call it; alone, this rank's.

    Ranks are numbered as in `group`. Raises ConfigError where ranks disagree about a parameter.
    """
    mine = {
        name: (tuple(parameter.shape), parameter.dtype, local_box(parameter))
        for name, parameter in named_parameters(model, rename)
    }
    everyone = [(platform.node(), mine)]
    if dist.is_initialized():
        everyone *= dist.get_world_size(group)
        dist.all_gather_object(everyone, everyone[0], group=group)
    boxes: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    seen: dict[str, tuple[Index, torch.dtype, int]] = {}
    for rank, (_, tensors) in enumerate(everyone):
        for name, (shape, dtype, box) in tensors.items():
            earlier = seen.setdefault(name, (shape, dtype, rank))
            if earlier[:2] != (shape, dtype):
                raise ConfigError(
                    f"rank {rank} holds {name!r} as {list(shape)} {dtype}, rank {earlier[2]} as "
                    f"{list(earlier[0])} {earlier[1]}; load the same model on all ranks"
                )
            if box.elements:
                boxes[name][box].append(rank)
    parameters, dtypes = {}, {}
    for name, (shape, dtype, _) in seen.items():
        origin = (0,) * len(shape)
        shards = tuple(Shard(box, origin, tuple(ranks)) for box, ranks in boxes[name].items())
        parameters[name], dtypes[name] = ShardedParameter(shape, name, shards), dtype
    return ShardMap(len(everyone), parameters, dtypes, tuple(host for host, _ in everyone))


def local_box(parameter: Tensor) -> Box:
    """Find the part of a parameter that this rank stores; its size has a 0 where it stores none.

    FSDP2 cuts what tensor parallelism left, though its axis comes first in the mesh: DTensor writes
    that as a strided shard. So strided shards are applied last, and every cut is torch.chunk's.
    Raises ConfigError for a parameter that is sharded in another way.
    """
    box = Box.whole(parameter.shape)
    if not isinstance(parameter, DTensor):
        return box
    mesh, coordinates = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinates is not None, "this rank has no part in the parameter's mesh"
    splits = [(d, p) for d, p in enumerate(parameter.placements) if not p.is_replicate()]
    splits.sort(key=lambda split: hasattr(split[1], "split_factor"))
    for mesh_dim, placement in splits:
        dim = getattr(placement, "dim", None)
        box = chunk(box, dim, mesh.size(mesh_dim), coordinates[mesh_dim])
    local_shape = tuple(parameter.to_local().shape)
    if local_shape != box.size:
        raise ConfigError(
            f"a parameter {list(parameter.shape)} placed as {parameter.placements} has "
            f"{list(local_shape)} on this rank, not {list(box.size)}: this way of sharding can't "
            "be resharded; use FSDP2 (fully_shard) and tensor parallel Shard placements"
        )
    return box


class _TensorInfo(NamedTuple):
    """A tensor of the full model, and the pipeline stage that has it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's parameters and persistent buffers by name; tied ones once."""
    by_identity: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_identity.setdefault(id(tensor), (name, tensor))
    return dict(by_identity.values())


@torch.no_grad()
def gather_full_tensors(
    model: nn.Module,
    ranks: Ranks,
    copies: Mapping[str, str] | None = None,
    include: Callable[[str], bool] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and persistent buffer, in full, in its own dtype, on the ranks' device.

    All ranks must iterate to the end together: each step is a collective. A tensor may be the
    model's own storage: read it, or copy. `copies` maps this rank's tensors that repeat one of
    another stage (a tied head) to that one's name; they are left out. `include`: which names.
    """
    fsdp.reshard(model)
    local = {
        name: tensor
        for name, tensor in named_tensors(model).items()
        if name not in (copies or {}) and (include is None or include(name))
    }
    stages = ranks.group("pp")
    for entry in _tensor_infos(local, ranks):
        if entry.stage == ranks.index("pp"):
            full = _full_tensor(local[entry.name])
        else:
            assert ranks.mesh is not None, "a rank alone has all tensors"
            full = torch.empty(entry.shape, dtype=entry.dtype, device=ranks.mesh.device_type)
        if stages is not None:
            dist.broadcast(full, group_src=entry.stage, group=stages)
        if full.is_cuda:
            # Ranks that write nothing would enqueue all gathers at once, and NCCL's watchdog would
            # count the time that rank 0 takes to write them against each.
            torch.cuda.current_stream(full.device).synchronize()
        yield entry.name, full


@torch.no_grad()
def load_full_tensors(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    copies: Mapping[str, str] | None = None,
) -> None:
    """Copy full tensors into this rank's shards, in place and without communication.

    `tensors` has the names that `gather_full_tensors` yields, or this rank's; `copies` is as there.
    Raises CheckpointError, before anything has changed, for a missing name or a wrong shape.
    """
    fsdp.reshard(model)
    local = named_tensors(model)
    sources = {name: (copies or {}).get(name, name) for name in local}
    for name, tensor in local.items():
        source = tensors.get(sources[name])
        if source is None or source.shape != tensor.shape:
            problem = "missing" if source is None else f"of shape {list(source.shape)}"
            raise CheckpointError(
                f"the weights are of another model: {sources[name]!r} is {problem}, this model "
                f"wants {list(tensor.shape)}; load those of the same configuration"
            )
    for name, tensor in local.items():
        local_tensor(tensor).copy_(shard_like(tensors[sources[name]], tensor))


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return the shard of `full`, a view, that this rank stores of a parameter `like` it.

    Raises ValueError for placements other than those of FSDP and tensor parallelism.
    """
    for placement in like.placements if isinstance(like, DTensor) else ():
        if not isinstance(placement, DTensorShard | _StridedShard | Replicate):
            raise ValueError(f"a parameter can't be loaded into the placement {placement}")
    box = local_box(like)
    return view(full, box.offset, box.size)


def _full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, by collectives of the ranks that share it."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    part: Any = tensor.detach().to(tensor.device_mesh.device_type)  # it may be offloaded
    placements = list(tensor.placements)
    for dim in range(len(placements)):  # in steps, as FSDP's cuts are inside tensor parallelism's
        placements[dim] = Replicate()
        part = part.redistribute(placements=placements)
    return local_tensor(part)


def _tensor_infos(local: Mapping[str, Tensor], ranks: Ranks) -> list[_TensorInfo]:
    """List what `gather_full_tensors` yields: tensors in order, stage by stage."""
    stage, group = ranks.index("pp"), ranks.group("pp")
    infos = [_TensorInfo(name, tuple(t.shape), t.dtype, stage) for name, t in local.items()]
    if group is None:
        return infos
    stages: list[list[_TensorInfo]] = [[] for _ in range(ranks.size("pp"))]
    dist.all_gather_object(stages, infos, group=group)
    by_name: dict[str, _TensorInfo] = {}
    for entry in itertools.chain(*stages):
        by_name.setdefault(entry.name, entry)  # a buffer may be on all stages
    return list(by_name.values())
