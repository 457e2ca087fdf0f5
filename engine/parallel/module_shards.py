"""The shards of a module: read from its parameters, so right for any layout.

A parameter is a DTensor (FSDP2, tensor parallel, both) or a plain tensor, full on its rank.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from engine.errors import ConfigError
from engine.parallel.boxes import Box, Index, chunk
from engine.parallel.shard_map import Shard, ShardedParameter, ShardMap

# From a module's parameter name to its name in the whole model; None for what is left out.
Rename = Callable[[str], str | None]


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this rank stores: its own storage, without a graph."""
    part = tensor.detach()
    if isinstance(part, DTensor):
        part = part.to_local()
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part


def local_tensors(model: nn.Module, rename: Rename | None = None) -> dict[str, Tensor]:
    """This rank's part of each parameter, without copies: what an Exchange sends from."""
    return {name: local_tensor(parameter) for name, parameter in named_parameters(model, rename)}


def named_parameters(model: nn.Module, rename: Rename | None) -> Iterator[tuple[str, Tensor]]:
    """Parameters by their names in the whole model."""
    for name, parameter in model.named_parameters():
        known = rename(name) if rename else name
        if known is not None:
            yield known, parameter


def gather_shard_map(
    model: nn.Module, group: dist.ProcessGroup | None = None, rename: Rename | None = None
) -> ShardMap:
    """The shards of all ranks of `group`, which must all call it; this rank's alone without ranks.

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
    known: dict[str, tuple[Index, torch.dtype, int]] = {}
    for rank, (_, theirs) in enumerate(everyone):
        for name, (shape, dtype, box) in theirs.items():
            before = known.setdefault(name, (shape, dtype, rank))
            if before[:2] != (shape, dtype):
                raise ConfigError(
                    f"rank {rank} holds {name!r} as {list(shape)} {dtype}, rank {before[2]} as "
                    f"{list(before[0])} {before[1]}; load the same model on all ranks"
                )
            if box.elements:
                boxes[name][box].append(rank)
    parameters = {
        name: ShardedParameter(
            shape,
            name,
            tuple(Shard(b, (0,) * len(shape), tuple(r)) for b, r in boxes[name].items()),
        )
        for name, (shape, _, _) in known.items()
    }
    dtypes = {name: dtype for name, (_, dtype, _) in known.items()}
    return ShardMap(len(everyone), parameters, dtypes, tuple(host for host, _ in everyone))


def local_box(parameter: Tensor) -> Box:
    """The part of a parameter that this rank stores; its size has a 0 where the rank stores none.

    FSDP2 cuts what tensor parallelism left, though its axis comes first in the mesh: DTensor writes
    that as a strided shard. So strided shards are applied last, and every cut is torch.chunk's.
    Raises ConfigError for a parameter that is sharded in another way.
    """
    box = Box.whole(parameter.shape)
    if not isinstance(parameter, DTensor):
        return box
    mesh, coordinates = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinates is not None, "this rank has no part in the parameter's mesh"
    cuts = [(d, p) for d, p in enumerate(parameter.placements) if not p.is_replicate()]
    cuts.sort(key=lambda cut: hasattr(cut[1], "split_factor"))
    for mesh_dim, placement in cuts:
        dim = getattr(placement, "dim", None)
        box = chunk(box, dim, mesh.size(mesh_dim), coordinates[mesh_dim])
    local = tuple(parameter.to_local().shape)
    if local != box.size:
        raise ConfigError(
            f"a parameter {list(parameter.shape)} placed as {parameter.placements} has "
            f"{list(local)} on this rank, not {list(box.size)}: this way of sharding can't be "
            "resharded; use FSDP2 (fully_shard) and tensor parallel Shard placements"
        )
    return box
